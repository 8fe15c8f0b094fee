"""`Decision` and `Reason`: what a policy answers, and why. Nothing waits without one code and one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from suika.core.cluster import Device
from suika.core.layout import Layout


class ReasonCode(StrEnum):
    """Stable codes, the same in CLI, REST, metrics and web. Codes may be added, never renamed."""

    # why a job waits
    QUEUED = "queued"
    NO_FREE_DEVICES = "no-free-devices"
    FRAGMENTED = "fragmented"  # enough devices in sum, not where they are needed
    RESERVED = "reserved"  # devices are being kept for a bigger gang
    QUOTA = "quota"
    LOWER_PRIORITY = "lower-priority"
    MOVE_IN_FLIGHT = "move-in-flight"
    UNSATISFIABLE = "unsatisfiable"
    # why a job was started, moved or stopped
    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    RELAYOUT = "relayout"  # same number of devices, another layout
    MIGRATE = "migrate"  # same layout, other devices
    MAKE_ROOM = "make-room"
    PREEMPT = "preempt"
    DRAIN = "drain"
    DEVICE_LOST = "device-lost"
    USER = "user"
    RECOVER = "recover"
    # how it ended
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Reason:
    code: ReasonCode
    sentence: str

    def __str__(self) -> str:
        return f"{self.code}: {self.sentence}"


class Action(StrEnum):
    START = "start"  # waiting job gets devices
    REDEPLOY = "redeploy"  # running job gets other devices and/or another layout
    PREEMPT = "preempt"  # running job gives up all devices, keeping its state
    WAIT = "wait"  # waiting job stays waiting (carries the reason)


@dataclass(frozen=True)
class Decision:
    """One job's part of what a policy decided.

    `devices[r]` is the device of rank r (empty for PREEMPT and WAIT); `layout` has `layers_per_stage` resolved by the
    executor. Running jobs without a decision keep what they have.
    """

    job_id: str
    action: Action
    reason: Reason
    layout: Layout | None = None
    devices: tuple[Device, ...] = ()

    def __post_init__(self) -> None:
        gets = self.action in (Action.START, Action.REDEPLOY)
        assert gets == (self.layout is not None), f"{self.action} of {self.job_id}: layout {self.layout}"
        assert not gets or self.layout is None or self.layout.num_ranks == len(self.devices), (
            f"{self.job_id}: layout {self.layout} on {len(self.devices)} devices"
        )
