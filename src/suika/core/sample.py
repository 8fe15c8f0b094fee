"""`StepSample`: what a profiled optimizer step of one rank tells the estimator."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    op_s: dict[str, float] = field(default_factory=dict)  # op class -> seconds (forward, backward, optimizer, ...)
    collectives: tuple[CollectiveSample, ...] = ()
    idle_s: float = 0.0
    profiler_s: float = 0.0  # time the profiler itself took
    kind: str = "steady"  # steady, first, move, snapshot, evaluation
