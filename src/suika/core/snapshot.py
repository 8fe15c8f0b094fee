"""`Snapshot`: the frozen view of cluster and jobs at one instant. Policies see nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from suika.core.cluster import Cluster, Device
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.quota import Quota


@dataclass(frozen=True)
class Option:
    """One point of a job's scaling curve: the best memory-feasible layout on a given shape of devices.

    `shape` is devices per node, descending: (4, 4) is two nodes with four each.
    """

    shape: tuple[int, ...]
    layout: Layout
    step_s: float
    device_type: str

    @property
    def num_devices(self) -> int:
        return sum(self.shape)

    @property
    def steps_per_s(self) -> float:
        return 1.0 / self.step_s


@dataclass(frozen=True)
class ScalingCurve:
    """Options of one job, ascending by (device_type, num_devices, number of nodes); cached by whoever builds it.

    `version` changes exactly when the options do, so that a policy may keep derived state per (job, version).
    """

    options: tuple[Option, ...]
    version: int = 0


@dataclass(frozen=True)
class Move:
    """What changing one running (or resuming one stopped) job costs."""

    pause_s: float  # from its last old step to its first new one, beyond a step
    release_s: float  # from now until devices it gives up are free for others
    moved_bytes: int = 0


class MoveCost(Protocol):
    """Predicts moves. Pure and fast: called many times in one decision."""

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        """The move of `job` to `layout` on `devices` in rank order (None and none: it gives everything up)."""
        ...

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """`devices` in the rank order in which least of the running `job` moves."""
        ...

    def typical(self, job: JobView) -> float:
        """Pause in seconds of a typical change of `job`, when devices are not known yet."""
        ...


@dataclass(frozen=True)
class JobView:
    """A job that has not ended, as a policy sees it. Times are on the snapshot's clock."""

    id: str
    state: JobState
    submitted_s: float
    remaining_steps: float  # predicted; declared steps where the user gave them
    done_steps: float
    curve: ScalingCurve
    min_devices: int
    max_devices: int
    tenant: str = "default"
    priority: int = 0
    weight: float = 1.0
    started_s: float | None = None
    layout: Layout | None = None  # of the running generation
    devices: tuple[Device, ...] = ()  # rank order; while moving: of the new generation
    observed_step_s: float | None = None  # live measurement in the present layout
    moving_until_s: float | None = None  # a move is in flight until then: leave the job alone, unless it is
    interruptible: bool = False  # a stop and restart, which may as well begin again elsewhere, at its full cost
    attained_device_s: float = 0.0  # devices x time held so far
    last_change_s: float | None = None
    num_moves: int = 0
    deadline_s: float | None = None
    requested_devices: int = 0  # what its user asked for; 0: as many as it can use, `max_devices`
    fixed_layout: Layout | None = None  # a user's word: honour it or wait
    has_state: bool = False  # started before: a start is a resume
    stoppable: bool = True  # False, its user's word: it may not be made to give up all its devices
    pinned: bool = False  # nor may it be moved: it keeps what it has until it ends
    as_of_s: float | None = None  # when the two step counts were read; None: at the snapshot's time

    @property
    def running(self) -> bool:
        return bool(self.devices)

    def locked_at(self, now_s: float) -> bool:
        """Whether the job must be left alone: a move is in flight, which must end first, or it may not be touched."""
        if self.pinned and self.devices:
            return True
        return self.moving_until_s is not None and self.moving_until_s > now_s and not self.interruptible

    @property
    def step_s(self) -> float | None:
        """Seconds per step where it runs: as measured, else as the curve says of its size (or the next smaller one that
        it has); None while it waits."""
        if not self.devices:
            return None
        if self.observed_step_s is not None:
            return self.observed_step_s
        fitting = [o for o in self.curve.options if o.num_devices <= len(self.devices)]
        nearest = max((o.num_devices for o in fitting), default=0)
        return min((o.step_s for o in fitting if o.num_devices == nearest), default=None)

    def remaining_at(self, now_s: float) -> float:
        """Steps left at `now_s`: the count as read, less what was done since at the present pace.

        A driver may keep handing out one view of a job that nothing has happened to: it stays true as time passes.
        """
        if self.as_of_s is None or self.step_s is None:
            return self.remaining_steps
        since_s = max(now_s - max(self.as_of_s, self.moving_until_s or 0.0), 0.0)
        return max(self.remaining_steps - since_s / self.step_s, 0.0)


@dataclass(frozen=True)
class Snapshot:
    """Cluster and jobs at `now_s`. `jobs` is ordered by (submitted_s, id)."""

    now_s: float
    cluster: Cluster
    jobs: tuple[JobView, ...]
    move_cost: MoveCost
    down: frozenset[Device] = frozenset()  # lost or dirty
    slow: Mapping[Device, float] = field(default_factory=dict, hash=False)  # times as long as their peers
    draining: frozenset[str] = frozenset()  # nodes that take no new work and are to be emptied
    promised: Mapping[Device, float] = field(default_factory=dict, hash=False)  # being released: free from that time on
    quotas: Mapping[str, Quota] = field(default_factory=dict, hash=False)  # by tenant; absent: borrows, no maximum

    @cached_property
    def job_of(self) -> Mapping[str, JobView]:
        return {job.id: job for job in self.jobs}

    @cached_property
    def free(self) -> tuple[Device, ...]:
        """Devices that a decision may hand out at once, in walk order."""
        used = {device for job in self.jobs for device in job.devices}
        return tuple(
            d
            for d in self.cluster.devices
            if d not in used
            and d not in self.down
            and d not in self.slow
            and d not in self.promised
            and d.node not in self.draining
        )
