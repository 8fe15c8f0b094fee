"""`World`: what is simulated, apart from the policy. `Outcome`: what comes of it under one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from suika.core.cluster import Cluster
from suika.core.quota import Quota
from suika.core.snapshot import MoveCost
from suika.simulate.jobs import Record, SimJob
from suika.simulate.predictor import Predictor


@dataclass(frozen=True)
class Failure:
    """Node `node`, or only its device `index`, is gone from `at_s` for `down_s` seconds."""

    at_s: float
    node: str
    down_s: float
    index: int | None = None


@dataclass(frozen=True)
class Slowdown:
    """On node `node`, or only on its device `index`, steps take `times` as long from `at_s` on for `for_s` seconds."""

    at_s: float
    node: str
    for_s: float
    times: float
    index: int | None = None


@dataclass(frozen=True)
class World:
    cluster: Cluster
    jobs: tuple[SimJob, ...]
    move_cost: MoveCost
    predictor: Predictor = field(default_factory=Predictor)
    failures: tuple[Failure, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    snapshot_every_s: float = 1800.0  # what a failure can cost a job, at most
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    interruptible: bool = False  # whether a job whose move is in flight may be sent elsewhere, at the full cost again
    failing_moves: float = 0.0  # share of the moves of running jobs that fail; their pause is lost
    seed: int = 0  # of which moves fail


@dataclass
class Outcome:
    """Records of all jobs (in order of submission), and of the decisions."""

    records: list[Record]
    decision_cpu_s: list[float] = field(default_factory=list)
    num_rejected: int = 0
    busy: list[tuple[float, int]] = field(default_factory=list)  # (time, devices held) at each change
