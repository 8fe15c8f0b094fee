"""What a foreign program's profile says: samples per rank, and factors of op classes from the shapes it ran.

The program's model is unknown, but its matrix products and collectives carry their shapes: the roofline prices the same
shapes, and the ratio is the factor. Element-wise work is priced by the bytes of its operands.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from suika.core.errors import require
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.sample import CollectiveSample, StepSample
from suika.estimate import comm
from suika.estimate.calibrate import Calibration
from suika.estimate.columns import LayoutColumns
from suika.estimate.compute import gemm_s
from suika.estimate.grid import Grid
from suika.estimate.predict import setting
from suika.estimate.samples import Steady, steady_step

GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
ATTENTION = ("attention", "softmax", "flash", "sdpa")
TRAFFIC = ("nccl", "gloo", "c10d", "all_reduce", "allreduce", "all_gather", "allgather", "reduce_scatter", "broadcast")
# c10d's names of what prices like an all-reduce, and like half of one.
WHOLE, HALF = ("all_reduce", "allreduce"), ("all_gather", "_all_gather_base", "reduce_scatter", "_reduce_scatter_base")
FEW = 0.15  # standard deviation of log(measured / roofline) of one kind of operation


@dataclass(frozen=True)
class Profile:
    """All ranks of one program."""

    samples: tuple[StepSample, ...]
    steady: Steady | None
    factors: Calibration
    errors: tuple[str, ...]


def op_class(name: str) -> str:
    lower = name.lower()
    if lower in GEMMS:
        return "gemm"
    if any(word in lower for word in TRAFFIC):
        return "collective"
    if lower.startswith("optimizer.") or "adam" in lower:
        return "optimizer"
    if any(word in lower for word in ATTENTION):
        return "attention"
    return "vector" if lower.startswith("aten::") else "host"


def is_note(name: str) -> bool:
    """A backend's own note of a collective: it runs beside the waiting thread and is no work of its own."""
    return name.startswith(("gloo:", "nccl:"))


def read_profile(documents: Sequence[Mapping[str, Any]], device_type: str) -> Profile:
    """Samples and factors from the files that the hook wrote, one document per process."""
    require(len(documents) > 0, "exec", "no profile", "the program took no optimizer step", "does it train with torch?")
    samples = [sample for document in documents for sample in _samples(document)]
    known = Calibration.prior(device_type, "exec")
    for document in documents:
        known = _observe(known, document, device_type)
    errors = tuple(error for document in documents for error in document["errors"])
    return Profile(tuple(samples), steady_step(_slowest(samples)), known, errors)


def _slowest(samples: Sequence[StepSample]) -> list[StepSample]:
    """One sample per step: that of the rank that took longest, which is what the job took."""
    found: dict[int, StepSample] = {}
    for sample in samples:
        if sample.step not in found or sample.step_s > found[sample.step].step_s:
            found[sample.step] = sample
    return list(found.values())


def _samples(document: Mapping[str, Any]) -> list[StepSample]:
    """One sample per step; those of the window carry its operations, averaged over its steps."""
    window, rank = document["window"], document["rank"]
    found = []
    for i, step_s in enumerate(document["step_s"], start=1):
        kind = "first" if i <= 2 else "steady"
        op_s: dict[str, float] = {}
        collectives: tuple[CollectiveSample, ...] = ()
        if window and window["first"] <= i < window["first"] + window["steps"]:
            kind = "profiled"  # slower than it would have been
            for name, _, _, seconds in window["ops"]:
                if not is_note(name):
                    op_s[op_class(name)] = op_s.get(op_class(name), 0.0) + seconds / window["steps"]
            if i == window["first"]:
                collectives = tuple(_collectives(window))
        idle = max(step_s - sum(op_s.values()), 0.0) if op_s else 0.0
        own = document["profiler_s"] if window and i == window["first"] else 0.0
        found.append(StepSample("exec", 0, i, rank, step_s, op_s, collectives, idle, profiler_s=own, kind=kind))
    return found


def _collectives(window: Mapping[str, Any]) -> list[CollectiveSample]:
    """The flight recorder's log; a backend that logs no durations gets the window's, shared out by kind."""
    seconds: dict[str, tuple[int, float]] = {}
    for note, _, count, took in window["ops"]:
        if is_note(note):
            kind = note.split(":", 1)[1]
            before = seconds.get(kind, (0, 0.0))
            seconds[kind] = (before[0] + count, before[1] + took)
    found = []
    for name, num_bytes, size, milliseconds in window["collectives"]:
        count, total = seconds.get(name, (0, 0.0))
        duration = milliseconds / 1e3 if milliseconds else total / count if count else 0.0
        found.append(CollectiveSample("world", name, num_bytes, size, duration))
    return found


def _observe(known: Calibration, document: Mapping[str, Any], device_type: str) -> Calibration:
    window = document["window"]
    if not window:
        return known
    grid = _grid(device_type, document["precision"])
    measured = {"gemm": 0.0, "vector": 0.0}
    priced = {"gemm": 0.0, "vector": 0.0}
    for name, shapes, count, seconds in window["ops"]:
        kind = op_class(name)
        price = _priced(grid, kind, shapes)
        if price is not None:
            measured[kind] += seconds
            priced[kind] += count * price
    for kind, total in priced.items():
        if total > 0 and measured[kind] > 0:
            known = known.observe_class(kind, math.log(measured[kind] / total), FEW)
    ratios = [r for r in (_traffic_ratio(grid, c) for c in _collectives(window)) if r]
    return known.observe_class("dp", math.log(statistics.median(ratios)), FEW) if ratios else known


def _priced(grid: Grid, kind: str, shapes: Sequence[Sequence[int]]) -> float | None:
    """Roofline seconds of one operation; None where its shapes do not tell."""
    full = [shape for shape in shapes if shape]
    if kind == "gemm":
        operands = [shape for shape in full if len(shape) >= 2][-2:]
        if len(operands) < 2 or operands[0][-1] != operands[1][-2]:
            return None
        (*batch, m, k), n = operands[0], operands[1][-1]
        rate = grid.peak * grid.gemm
        m_all = m * math.prod(batch)
        return float(gemm_s(grid, np.asarray(float(m_all)), np.asarray(float(n)), np.asarray(float(k)), rate))
    if kind == "vector" and full:
        elements = sum(math.prod(shape) for shape in full) + max(math.prod(shape) for shape in full)
        return float(elements * grid.element_bytes / (grid.vector * grid.memory_bytes_per_s)) + 3e-6
    return None


def _traffic_ratio(grid: Grid, c: CollectiveSample) -> float | None:
    if c.duration_s <= 0 or c.group_size < 2 or c.message_bytes <= 0:
        return None
    of = comm.all_reduce_s if c.op in WHOLE else comm.half_reduce_s if c.op in HALF else None
    if of is None:
        return None
    size = np.asarray(float(c.group_size))
    return c.duration_s / float(of(grid, size, size, np.asarray(float(c.message_bytes))))


def _grid(device_type: str, precision: str) -> Grid:
    """Rates of the device: the model is a stand-in whose sizes are not used."""
    model = ModelSpec("unknown", "gpt", 1, 64, 256, 1, 256)
    s = setting(model, device_type, global_batch=1, sequence_length=64, precision=precision)
    return s.grid(LayoutColumns.of([Layout()], model))
