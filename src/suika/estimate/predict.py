"""`estimate_step`: the price and memory of one layout; `estimate_many`: of many at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from suika.core.cluster import Cluster
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Estimate
from suika.estimate.calibrate import HALF_WIDTH, Calibration, slopes
from suika.estimate.catalog import DeviceType, Wiring
from suika.estimate.catalog import device_type as lookup
from suika.estimate.columns import Array, LayoutColumns
from suika.estimate.grid import Grid, make_grid
from suika.estimate.memory import Memory, memory
from suika.estimate.pipeline import long_makespan
from suika.estimate.recipe import DEFAULT, Recipe
from suika.estimate.shared_cores import imbalance, shared_cores_s
from suika.estimate.step import Price, price


@dataclass(frozen=True)
class Setting:
    """What is estimated, apart from the layout: model, batch and where it runs."""

    model: ModelSpec
    global_batch: int
    sequence_length: int
    precision: str
    device: DeviceType
    wiring: Wiring
    recipe: Recipe = DEFAULT
    calibration: Calibration | None = None
    cores: float = 0  # that emulated devices share; 0: each has its own

    def grid(self, layouts: LayoutColumns) -> Grid:
        return make_grid(
            self.model,
            layouts,
            self.device,
            self.wiring,
            self.recipe,
            self.global_batch,
            self.sequence_length,
            self.precision,
            self.cores,
        )


COLD_SHARE = 0.8  # of the prior's spread: how far off cold predictions were, see docs/numbers/estimate.md


def setting(
    model: ModelSpec,
    device_type: str,
    *,
    global_batch: int,
    sequence_length: int,
    precision: str = "bf16",
    cluster: Cluster | None = None,
    devices_per_node: int = 0,
    recipe: Recipe = DEFAULT,
    calibration: Calibration | None = None,
    cores: int = 0,
) -> Setting:
    """`devices_per_node` (0: as many as the nodes have) is what the job holds of each node."""
    device = lookup(device_type, cluster)
    wiring = Wiring.of(device, cluster)
    if devices_per_node:
        per_node = min(devices_per_node, wiring.devices_per_node)
        wide = wiring.domain_size > wiring.devices_per_node
        domain = wiring.domain_size if wide else min(wiring.domain_size, per_node)
        wiring = replace(wiring, devices_per_node=per_node, domain_size=domain)
    return Setting(model, global_batch, sequence_length, precision, device, wiring, recipe, calibration, cores)


def estimate_many(s: Setting, layouts: LayoutColumns) -> tuple[Price, Memory]:
    """Prices and peaks of all rows at once (closed form of the pipeline)."""
    grid = s.grid(layouts)
    return price(grid, s.calibration.log_factors if s.calibration else None), memory(grid)


def estimate_step(
    model: ModelSpec,
    layout: Layout,
    device_type: str,
    *,
    global_batch: int,
    sequence_length: int,
    precision: str = "bf16",
    cluster: Cluster | None = None,
    devices_per_node: int = 0,
    recipe: Recipe = DEFAULT,
    calibration: Calibration | None = None,
    cores: int = 0,
) -> Estimate:
    """One layout, its pipeline priced by the max-plus recurrence of the real schedule over the real stages."""
    s = setting(
        model,
        device_type,
        global_batch=global_batch,
        sequence_length=sequence_length,
        precision=precision,
        cluster=cluster,
        devices_per_node=devices_per_node,
        recipe=recipe,
        calibration=calibration,
        cores=cores,
    )
    return estimate_layout(s, layout)


def estimate_layout(s: Setting, layout: Layout) -> Estimate:
    prices, memories = estimate_many(s, LayoutColumns.of([layout], s.model))
    parts = _parts_s(s, layout, prices)
    step = sum(parts.values())
    spread = float(np.exp(HALF_WIDTH * sigma(s, layout)))
    stages = [memories.stages[k] for k in ("first", "middle", "last")]
    first, middle, last = (int(np.ravel(value)[0]) for value in stages)
    peaks = (first, *[middle] * (layout.pp - 2), last) if layout.pp > 1 else (first,)
    return Estimate(
        step,
        step / spread,
        step * spread,
        parts,
        peaks,
        int(np.ravel(memories.p90)[0]),
        {k: int(np.ravel(v)[0]) for k, v in memories.parts.items() if np.ravel(v)[0]},
    )


def step_s_of(s: Setting, layout: Layout) -> float:
    """`estimate_layout(s, layout).step_s` alone, in a tenth of the time: without its interval and memory."""
    prices = price(s.grid(LayoutColumns.of([layout], s.model)), s.calibration.log_factors if s.calibration else None)
    return sum(_parts_s(s, layout, prices).values())


def _parts_s(s: Setting, layout: Layout, prices: Price) -> dict[str, float]:
    """The parts of a step of `layout`, row 0 of `prices`; none of them is 0."""
    parts = {name: float(np.ravel(value)[0]) for name, value in prices.parts_s.items()}
    if layout.pp > 1:
        closed = sum(parts[k] for k in parts if k not in ("dp", "optimizer", "shared_cores"))
        parts["pp_bubble"] += exact_pipeline_s(prices, layout, s.model) - closed
        path = sum(value for name, value in parts.items() if name != "shared_cores")
        load = prices.cores_s * _imbalance(prices, layout, s) if s.cores else prices.cores_s
        parts["shared_cores"] = float(np.ravel(shared_cores_s(np.asarray(path), load))[0])
    return {name: value for name, value in parts.items() if value}


def sigma(s: Setting, layout: Layout) -> float:
    """Standard deviation of log(measured / predicted step time)."""
    known = s.calibration or Calibration.prior(s.device.name)
    _, shares = slopes(s.grid(LayoutColumns.of([layout], s.model)), known.log_factors)
    return float(known.sigma(shares)[0]) * (COLD_SHARE if known.num_samples == 0 else 1.0)


def _imbalance(p: Price, layout: Layout, s: Setting) -> float:
    """Of the cores that emulated devices share, by what the stages of `layout` have to do."""
    forward, backward = _chunk_s(p, layout, s.model)
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    stages = [sum(both[stage :: layout.pp]) for stage in range(layout.pp)]
    return imbalance(stages, layout.tp * layout.cp, layout.dp, s.wiring.devices_per_node, s.cores)


def exact_pipeline_s(p: Price, layout: Layout, model: ModelSpec) -> float:
    """Makespan of the schedule over the real chunks of `layout`; row 0 of `p`."""
    return long_makespan(*_chunk_s(p, layout, model), layout.pp, int(float(np.ravel(p.num_micro)[0])))


def _chunk_s(p: Price, layout: Layout, model: ModelSpec) -> tuple[list[float], list[float]]:
    """Forward and backward of each chunk for one micro-batch, in model order; row 0 of `p`."""

    def at(value: Array) -> float:
        return float(np.ravel(value)[0])

    chunks = layout.resolve(model).layers_per_stage
    host = at(p.micro_batch_s) / 2 / layout.virtual_stages
    hop = at(p.hop_s)
    forward = [n * at(p.layer_forward_s) + host + hop for n in chunks]
    backward = [n * at(p.layer_backward_s) + host + hop for n in chunks]
    forward[0] += at(p.embedding_s)
    backward[0] += 2 * at(p.embedding_s)
    forward[-1] += at(p.head_forward_s)
    backward[-1] += at(p.head_backward_s)
    return forward, backward
