"""`StepSample`: what a profiled optimizer step of one rank tells the estimator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class CollectiveSample:
    """One collective or point-to-point operation as one rank saw it."""

    axis: str  # tp, pp, dp or world
    op: str  # all_reduce, all_gather, reduce_scatter, send, recv, ...
    message_bytes: int
    group_size: int
    duration_s: float


@dataclass(frozen=True)
class StepSample:
    """Times of one sampled step on one rank. `kind` excludes steps that are not steady training."""

    job_id: str
    generation: int
    step: int
    rank: int
    step_s: float
    op_s: dict[str, float] = field(default_factory=dict)  # class -> seconds (compute, optimizer, tp, dp, ...)
    collectives: tuple[CollectiveSample, ...] = ()
    idle_s: float = 0.0
    waited_s: float = 0.0  # wall seconds in which it waited for other ranks to send
    profiler_s: float = 0.0  # time the profiler itself took
    kind: str = "steady"  # steady, first, move, snapshot, evaluation

    def to_dict(self) -> dict[str, Any]:
        """JSON; like messages are added up: [axis, op, bytes, group size, count, seconds]."""
        totals: dict[tuple[str, str, int, int], list[float]] = {}
        for c in self.collectives:
            totals.setdefault((c.axis, c.op, c.message_bytes, c.group_size), []).append(c.duration_s)
        rows = [[*key, len(times), sum(times)] for key, times in totals.items()]
        return {**asdict(self), "collectives": rows}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StepSample:
        """The inverse of `to_dict`; like messages come back with their mean duration."""
        collectives = tuple(
            CollectiveSample(axis, op, num_bytes, size, total / count)
            for axis, op, num_bytes, size, count, total in data["collectives"]
            for _ in range(count)
        )
        return StepSample(**{**data, "collectives": collectives})
