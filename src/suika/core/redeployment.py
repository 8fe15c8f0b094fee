"""`Redeployment`: the move of one job from one plan to another, and what is recorded of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from suika.core.decision import Reason
from suika.core.plan import Plan

Mode = Literal["keep", "lean"]  # both states side by side, or piece by piece (docs/design/reshard.md)


class Phase(StrEnum):
    """In order. Before COMMIT an abort restores the old plan; after it recovery only goes forward."""

    PREPARE = "prepare"  # joiners, groups, skeletons, move plan; training goes on
    CUT = "cut"  # all ranks stopped after the same optimizer step
    MOVE = "move"
    VERIFY = "verify"
    COMMIT = "commit"  # one compare-and-set on the job's record
    RELEASE = "release"  # leavers are gone, their devices are free
    ABORTED = "aborted"


@dataclass(frozen=True)
class Redeployment:
    """A move's record. Bytes and times are as design notes define them (docs/design/redeploy.md).

    `pause_s`: end of the first new optimizer step - end of the last old one - the new layout's median step.
    `moved_bytes`: received from another device. `bound_bytes`: the exact rank-level minimum for the same devices.
    """

    job_id: str
    generation: int
    old: Plan
    new: Plan
    reason: Reason
    phase: Phase = Phase.PREPARE
    mode: Mode = "keep"
    cut_step: int | None = None
    moved_bytes: int = 0
    network_bytes: int = 0
    bound_bytes: int = 0
    pause_s: float | None = None
    prepare_lost_s: float = 0.0
    total_s: float | None = None
    phase_s: dict[str, float] = field(default_factory=dict)
    error: str | None = None
