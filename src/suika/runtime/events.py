"""What a `JobRun` tells its owner, in the order in which it happened. Plain data; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from suika.core.cluster import Device
from suika.core.redeployment import Redeployment
from suika.core.sample import StepSample


class Outcome(StrEnum):
    FINISHED = "finished"  # all steps are done
    PREEMPTED = "preempted"  # saved at one agreed step, then gave up its devices
    LOST = "lost"  # a process died or a link broke: go on from `snapshot`
    FAILED = "failed"  # the program raised: it would do so again
    KILLED = "killed"  # the owner ended it without saving


@dataclass(frozen=True)
class JobEvent:
    job_id: str
    generation: int


@dataclass(frozen=True)
class Started(JobEvent):
    """The first optimizer step after a start is done. `resumed_step`: steps done when it began (0 for a fresh job)."""

    resumed_step: int
    launch_s: float  # from `start` to the end of the first step
    devices: tuple[Device, ...]
    fell_back: str | None = None  # why it could not start from copies in memory, as was asked, but from disk
    copies: str | None = None  # the name of the copies in memory that it started from


@dataclass(frozen=True)
class StepDone(JobEvent):
    """`at_s`: when the coordinator heard of its end (its monotonic clock); `loss`: the global mean before the update.

    A loss or norm that is not finite is None: messages carry no NaN.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    num_tokens: int
    at_s: float


@dataclass(frozen=True)
class Sampled(JobEvent):
    """One rank's profiled step: where its seconds went."""

    sample: StepSample


@dataclass(frozen=True)
class Moving(JobEvent):
    """A redeployment entered a phase (`record.phase`); COMMIT and ABORTED are its end for the job's state."""

    record: Redeployment


@dataclass(frozen=True)
class Released(JobEvent):
    """The processes on `devices` are gone: others may have them."""

    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Measured(JobEvent):
    """The final record of a committed redeployment: `pause_s` is known once the new layout's median step is."""

    record: Redeployment


@dataclass(frozen=True)
class Snapshotted(JobEvent):
    """A snapshot is complete on disk. `stall_s` is the training time that it cost."""

    step: int
    path: str
    stall_s: float


@dataclass(frozen=True)
class Copied(JobEvent):
    """A copy of the state is complete in memory, each part of it on two nodes. `lacking`: why some of it is not."""

    step: int
    num_bytes: int  # on all nodes together
    stall_s: float
    nodes: tuple[str, ...] = ()  # where it lies
    lacking: str | None = None


@dataclass(frozen=True)
class Uncopied(JobEvent):
    """From now on copies in memory are not made, or not on two nodes: `why`. Training does not notice. Told again only
    after a copy was well, or when it is another kind of trouble."""

    why: str


@dataclass(frozen=True)
class Ended(JobEvent):
    """No process of the job is left, but (LOST) the holders of copies in memory that `snapshot` names. `dead`: devices
    whose process died or stopped answering (LOST)."""

    outcome: Outcome
    step: int  # steps done when it ended
    snapshot: str | None  # the newest complete snapshot, or newer copies in memory: what to start from
    snapshot_step: int
    error: str | None = None
    dead: tuple[Device, ...] = ()
    noticed_s: float = 0.0  # LOST: from the last sign of life to noticing
    exit_code: int | None = None  # of a command that ended by itself
    unreachable: bool = False  # LOST: with its node; its processes there may not know yet

    @property
    def steps_lost(self) -> int:
        return max(0, self.step - self.snapshot_step)


class AllStepsDoneError(Exception):
    """No fault: the ranks have stopped after their last step, whatever was being waited for."""
