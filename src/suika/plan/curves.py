"""Scaling curves: for each device count and spread over nodes, the fastest layout that fits into memory."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count

import numpy as np

from suika.core.cluster import Cluster
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.snapshot import Option, ScalingCurve
from suika.estimate.calibrate import Calibration
from suika.estimate.catalog import device_type as lookup
from suika.estimate.catalog import is_known
from suika.estimate.columns import LayoutColumns
from suika.estimate.knowledge import Known
from suika.estimate.predict import Setting, estimate_many, setting
from suika.estimate.recipe import BUILT_IN as BUILT_IN_RECIPE
from suika.estimate.recipe import DEFAULT, Recipe
from suika.plan.layouts import BUILT_IN, Space, layout_columns

# Below this many devices every count is an option; beyond it only whole nodes are.
DENSE_COUNTS = 16


def scaling_curve(
    model: ModelSpec,
    cluster: Cluster,
    *,
    global_batch: int,
    sequence_length: int,
    precision: str = "bf16",
    min_devices: int = 1,
    max_devices: int = 0,
    device_type: str | None = None,
    space: Space = BUILT_IN,
    recipe: Recipe = DEFAULT,
    calibrations: dict[str, Calibration] | None = None,
    layout: Layout | None = None,
    counts: Sequence[int] | None = None,
    cores: int = 0,
) -> ScalingCurve:
    """Options of a job on `cluster`: per device type, device count and number of nodes, the layout with the least
    predicted step time among those whose p90 memory fits. `layout` fixes the layout; `counts` overrides which device
    counts are looked at (default: all up to a node or 16, then whole nodes). `calibrations` is per device type.
    `cores` > 0: emulated devices that share so many cores; by default each is priced as if it had its own.
    """
    types = tuple(dict.fromkeys(node.device_type for node in cluster.nodes))
    if device_type is not None:
        types = cluster.types_named(device_type)
        if not any(is_known(name, cluster) for name in types):
            lookup(device_type, cluster)  # refuses a name that means nothing; another type just has no nodes here
    options: list[Option] = []
    for name in types:
        if not is_known(name, cluster):
            continue  # a node of such devices runs commands
        sizes = sorted((n.num_devices for n in cluster.nodes if n.device_type == name), reverse=True)
        top = min(sum(sizes), max_devices or sum(sizes))
        if layout is not None:
            wanted: Sequence[int] = [layout.num_ranks]
        else:
            wanted = [c for c in (counts or _counts(min_devices, top, sizes[0])) if min_devices <= c <= top]
        s = setting(
            model,
            name,
            global_batch=global_batch,
            sequence_length=sequence_length,
            precision=precision,
            cluster=cluster,
            recipe=recipe,
            calibration=(calibrations or {}).get(name),
            cores=cores,
        )
        options.extend(_options(s, name, wanted, sizes, space, layout))
    options.sort(key=lambda o: (o.device_type, o.num_devices, len(o.shape)))
    return curve_with(tuple(options))


def _counts(low: int, high: int, node: int) -> list[int]:
    dense = max(node, DENSE_COUNTS)
    return [n for n in range(low, high + 1) if n <= dense or n % node == 0]


def shapes_of(num_devices: int, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """How `num_devices` may lie on nodes of `sizes` (descending): on as few nodes as can be, and spread evenly over
    twice as many (a fragmented cluster)."""
    ends = list(accumulate(sizes))
    whole = bisect_left(ends, num_devices)  # nodes that are filled
    if whole == len(sizes):
        return []
    packed = (*sizes[:whole], num_devices - (ends[whole - 1] if whole else 0))
    shapes = [packed]
    wide = 2 * len(packed)
    if num_devices % wide == 0 and wide <= len(sizes) and num_devices // wide <= sizes[wide - 1]:
        shapes.append((num_devices // wide,) * wide)
    return shapes


def _options(
    s: Setting, name: str, counts: Sequence[int], sizes: Sequence[int], space: Space, fixed: Layout | None
) -> list[Option]:
    spreads: dict[int, dict[int, list[tuple[int, ...]]]] = {}
    for n in counts:
        for shape in shapes_of(n, sizes):
            # Groups are aligned to what every node of the shape can hold.
            per_node = shape[0] if len(shape) == 1 else int(np.gcd.reduce(shape))
            spreads.setdefault(per_node, {}).setdefault(n, []).append(shape)
    found: list[Option] = []
    for per_node, shapes in spreads.items():
        wiring = s.wiring
        domain = (
            min(wiring.domain_size, per_node) if wiring.domain_size <= wiring.devices_per_node else wiring.domain_size
        )
        here = replace(s, wiring=replace(wiring, devices_per_node=per_node, domain_size=domain))
        best = _best(here, list(shapes), space, per_node, fixed)
        for n, (layout, step) in best.items():
            found.extend(Option(shape, layout, step, name) for shape in shapes[n])
    return found


def _best(
    s: Setting, counts: Sequence[int], space: Space, per_node: int, fixed: Layout | None
) -> dict[int, tuple[Layout, float]]:
    """The fastest fitting layout of each count and its step time. Ties: the smaller tp, then pp, then micro-batch."""
    if fixed is not None:
        columns = LayoutColumns.of([fixed], s.model)
    else:
        columns = layout_columns(
            s.model,
            counts,
            global_batch=s.global_batch,
            sequence_length=s.sequence_length,
            space=space,
            devices_per_node=per_node,
        )
    if not len(columns):
        return {}
    prices, memories = estimate_many(s, columns)
    fits = memories.p90 <= s.device.memory_bytes
    devices = columns.tp * columns.pp * columns.dp * columns.cp
    step = np.where(fits, prices.step_s, np.inf)
    order = np.lexsort((columns.micro_batch, columns.pp, columns.tp, step, devices))
    sorted_devices = devices[order]
    first = order[np.concatenate(([True], sorted_devices[1:] != sorted_devices[:-1]))]
    return {
        int(devices[i]): (fixed.resolve(s.model) if fixed else columns.layout(i, s.model), float(step[i]))
        for i in first
        if np.isfinite(step[i])
    }


_versions: OrderedDict[tuple[Option, ...], ScalingCurve] = OrderedDict()
_numbers = count(1)


def curve_with(options: tuple[Option, ...]) -> ScalingCurve:
    """The same options always get the same curve object and version, so that policies' caches stay warm."""
    found = _versions.get(options)
    if found is None:
        found = _versions[options] = ScalingCurve(options, next(_numbers))
        while len(_versions) > 4096:
            _versions.popitem(last=False)
    return found


def curve_of_job(
    spec: JobSpec,
    cluster: Cluster,
    calibrations: dict[str, Calibration] | None = None,
    space: Space = BUILT_IN,
    recipe: Recipe = BUILT_IN_RECIPE,
    cores: int = 0,
) -> ScalingCurve:
    """The curve of a submitted job: its device range, device type and fixed layout honoured. `known_curve` adds what
    running jobs have taught."""
    return scaling_curve(
        spec.model,
        cluster,
        global_batch=spec.global_batch,
        sequence_length=spec.sequence_length,
        precision=spec.precision,
        min_devices=spec.devices.min,
        max_devices=spec.devices.max,
        device_type=spec.devices.type,
        space=space,
        layout=spec.layout if isinstance(spec.layout, Layout) else None,
        calibrations=calibrations,
        recipe=recipe,
        cores=cores,
    )


def known_curve(
    spec: JobSpec,
    cluster: Cluster,
    known: Sequence[Known] = (),
    space: Space = BUILT_IN,
    recipe: Recipe = BUILT_IN_RECIPE,
) -> ScalingCurve:
    """`curve_of_job` after what was learned, by device type: the factors choose among layouts, the pace scales all."""
    return paced(curve_of_job(spec, cluster, {k.device_type: k.calibration for k in known}, space, recipe), known)


def paced(curve: ScalingCurve, known: Sequence[Known]) -> ScalingCurve:
    """`curve` with the pace of each device type that has one."""
    return slowed(curve, {k.device_type: k.pace for k in known if k.pace is not None})


def slowed(curve: ScalingCurve, pace: Mapping[str, float]) -> ScalingCurve:
    """`curve` with the step times of each device type multiplied by its `pace`, where it has one."""
    options = (replace(o, step_s=o.step_s * pace[o.device_type]) if o.device_type in pace else o for o in curve.options)
    return curve_with(tuple(options)) if pace else curve


def setting_of_job(
    spec: JobSpec,
    cluster: Cluster,
    device_type: str,
    devices_per_node: int,
    calibration: Calibration | None = None,
    recipe: Recipe = BUILT_IN_RECIPE,
    cores: int = 0,
) -> Setting:
    """What prices layouts of a job on `devices_per_node` devices of each node of one type."""
    return setting(
        spec.model,
        device_type,
        global_batch=spec.global_batch,
        sequence_length=spec.sequence_length,
        precision=spec.precision,
        cluster=cluster,
        devices_per_node=devices_per_node,
        recipe=recipe,
        calibration=calibration,
        cores=cores,
    )
