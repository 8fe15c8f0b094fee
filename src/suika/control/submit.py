"""The door: what is refused here is refused at once, with the field, the value and the fix, and nothing starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from suika.control.final import check_destination
from suika.core.cluster import Cluster
from suika.core.errors import SpecError, require
from suika.core.job import DeviceRange, JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.snapshot import ScalingCurve
from suika.train.data import END_OF_FILE, load_manifest, manifest_path
from suika.train.limits import check_runnable

CurveOf = Callable[[JobSpec], ScalingCurve]


def admit(data: Any, cluster: Cluster, curve_of: CurveOf) -> JobSpec:
    """The job that `data` (a parsed job file) describes, if this cluster could ever run it; else `SpecError`."""
    spec = parse_job(data)
    if not spec.rigid:
        check_data(spec)
        check_offered(spec)
        check_destination(spec.final_checkpoint)
    check_devices(spec, cluster)
    check_options(spec, curve_of)
    return spec


def check_options(spec: JobSpec, curve_of: CurveOf) -> None:
    """Raise unless at least one layout of the job's range fits the devices' memory and the batch."""
    wanted = spec.devices
    what = f"{spec.model.name} with global_batch({spec.global_batch})"
    problem = f"no layout of {what} fits that many devices of this cluster"
    fix = "widen the range, raise the batch or choose a smaller model"
    if spec.rigid:
        problem, fix = f"no nodes of one type hold {wanted.max} devices", "ask for fewer"
    require(
        any(wanted.min <= option.num_devices <= wanted.max for option in curve_of(spec).options),
        "job.devices",
        f"{wanted.min}..{wanted.max}",
        problem,
        fix,
    )


def check_data(spec: JobSpec) -> None:
    """Raise unless the data is an absolute, readable file or a folder with something in it, and the model knows its
    tokens (bytes and one end-of-file mark, unless it is tokenised already)."""
    path = spec.data
    require("\0" not in path and len(path) < 4096, "job.data", path, "is not a path")
    require(Path(path).is_absolute(), "job.data", path, "must be absolute", "the command line makes it so")
    require(os.path.exists(path), "job.data", path, "does not exist", "give a file or a folder of text")
    require(os.access(path, os.R_OK), "job.data", path, "cannot be read")
    if os.path.isdir(path):
        require(any(os.scandir(path)), "job.data", path, "is empty", "give a file or a folder of text")
    else:
        size, need = os.path.getsize(path), spec.sequence_length + 1
        require(size > 0, "job.data", path, "is empty", "give a file or a folder of text")
        require(size >= need, "job.data", path, f"holds {size} bytes; one sequence needs {need}", "give more text")
    tokenised = path.endswith(".bin") and manifest_path(path).exists()
    vocab = load_manifest(path).vocab if tokenised else END_OF_FILE + 1
    require(spec.model.vocab >= vocab, "job.model.vocab", spec.model.vocab, f"the data needs {vocab} tokens")


def check_offered(spec: JobSpec) -> None:
    """Raise for what the built-in trainer does not run (it checks again, once its processes are up)."""
    check_runnable(spec, spec.layout if isinstance(spec.layout, Layout) else Layout())


def check_devices(spec: JobSpec, cluster: Cluster) -> None:
    """Raise unless the cluster has the devices that the job cannot do without."""
    wanted = spec.devices.type
    types = sorted({node.device_type for node in cluster.nodes})
    meant = types if wanted is None else cluster.types_named(wanted)
    nodes = [node for node in cluster.nodes if node.device_type in meant]
    require(bool(nodes), "job.devices.type", wanted, "no node has this type", f"known: {', '.join(types)}")
    have = sum(node.num_devices for node in nodes)
    least = spec.layout.num_ranks if isinstance(spec.layout, Layout) else spec.devices.min
    require(
        least <= have,
        "job.devices.min",
        least,
        f"asks for {least} of {have} devices" + (f" of type {wanted}" if wanted else ""),
        "more than exist; ask for fewer",
    )
    if isinstance(spec.layout, Layout):
        largest = max(node.num_devices for node in nodes)
        require(
            spec.layout.tp <= largest,
            "job.layout.tp",
            spec.layout.tp,
            f"tp({spec.layout.tp}) > devices of the largest node({largest})",
            "a tensor-parallel group stays inside one node",
        )


def resized(spec: JobSpec, devices: str | None, layout: str | None, cluster: Cluster) -> JobSpec:
    """`spec` with a user's new wish: `devices` is `N` or `MIN:MAX`; `layout` is `tp=..,pp=..,dp=..` or `auto`.

    A fixed layout is honoured or waited for. A device range alone sets the layout back to `auto`.
    """
    require(bool(devices or layout), "resize", None, "nothing to change", "give --devices or --layout")
    require(not spec.rigid, "resize", spec.name, "a command is rigid: it keeps its size", "submit it anew")
    wish: dict[str, Any] = {"layout": "auto"}
    if layout and layout != "auto":
        fixed = Layout.parse(layout)
        wish = {"layout": fixed, "devices": _covering(spec.devices, fixed.num_ranks)}
    if devices:
        match = re.fullmatch(r"(\d+)(?::(\d+))?", devices)
        if match is None:
            raise SpecError("resize.devices", devices, "is not N or MIN:MAX", "write e.g. 4 or 2:8")
        low, high = int(match[1]), int(match[2] or match[1])
        asked = spec.devices.requested
        asked = asked if asked is not None and low <= asked <= high else None
        wish["devices"] = {"min": low, "max": high, "requested": asked, "type": spec.devices.type}
    changed = parse_job(spec.model_dump(mode="python") | {"model": spec.model} | wish)
    check_offered(changed)
    check_devices(changed, cluster)
    return changed


def _covering(devices: DeviceRange, num_ranks: int) -> DeviceRange:
    """The smallest range that holds `devices` and `num_ranks`: a fixed layout is its user's word."""
    low, high = min(devices.min, num_ranks), max(devices.max, num_ranks)
    return devices.model_copy(update={"min": low, "max": high})
