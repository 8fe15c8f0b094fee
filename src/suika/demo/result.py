"""What the demo found, and its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from suika.core.cluster import Device
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan

BOUND = 1e-9  # largest loss difference that fp64 jobs may show against their unmoved twins


@dataclass(frozen=True)
class JobResult:
    name: str
    steps: int
    final_loss: float | None
    jct_s: float | None
    finished: bool
    max_abs_loss_diff: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "steps": self.steps,
            "final_loss": self.final_loss,
            "jct_s": self.jct_s,
            "max_abs_loss_diff": self.max_abs_loss_diff,
        }


@dataclass(frozen=True)
class MoveResult:
    """One redeployment and what the same move costs by checkpoint and restart."""

    job: str
    old: Plan
    new: Plan
    reason: str
    sentence: str
    cut_step: int
    moved_bytes: int
    bound_bytes: int
    pause_s: float | None
    total_s: float | None
    at_s: float  # of its commit, since the first event
    beside: tuple[tuple[str, Plan], ...] = ()  # other jobs that trained then, and how
    checkpoint_restart_s: float | None = None
    checkpoint_restart_by: str | None = None  # memory or disk: the better of those tried
    checkpoint_restart_tried: tuple[str, ...] = ()

    @staticmethod
    def of(job: str, record: Mapping[str, Any], at_s: float, beside: tuple[tuple[str, Plan], ...]) -> MoveResult:
        """From the data of a `redeployed` event."""
        told = ("reason", "sentence", "cut_step", "moved_bytes", "bound_bytes", "pause_s", "total_s")
        return MoveResult(
            job,
            _plan(record, "old"),
            _plan(record, "new"),
            **{key: record[key] for key in told},
            at_s=at_s,
            beside=beside,
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the move shows, in the words of the README."""
        before, after = set(self.old.devices), set(self.new.devices)
        cut = self.new.layout.layers_per_stage
        kinds = ["grow"] if len(after) > len(before) else ["shrink"] if len(after) < len(before) else ["relayout"]
        if kinds == ["relayout"] and self.old.layout == self.new.layout:
            kinds = []
        return tuple(
            kinds
            + (["disjoint"] if not before & after else [])
            + (["uneven stages"] if len(set(cut)) > 1 else [])
            + (["dp=3"] if self.new.layout.dp == 3 else [])
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "old": self.old.layout.to_dict(),
            "new": self.new.layout.to_dict(),
            "old_devices": [str(device) for device in self.old.devices],
            "new_devices": [str(device) for device in self.new.devices],
            "moved_bytes": self.moved_bytes,
            "bound_bytes": self.bound_bytes,
            "pause_s": self.pause_s,
            "checkpoint_restart_s": self.checkpoint_restart_s,
            "checkpoint_restart_by": self.checkpoint_restart_by,
            "checkpoint_restart_tried": list(self.checkpoint_restart_tried),
            "total_s": self.total_s,
            "reason": self.reason,
            "kinds": list(self.kinds),
        }


def _plan(record: Mapping[str, Any], side: str) -> Plan:
    devices = tuple(Device.parse(text) for text in record[f"{side}_devices"])
    return Plan(Layout.from_dict(record[side]), Placement(devices))


@dataclass(frozen=True)
class Prediction:
    """A layout in which a job trained: its step as measured there last, and as predicted, there and before it came.

    Predictions are calibrated by what jobs had shown up to then, and do not know what else ran on the machine."""

    job: str
    layout: Layout
    measured_step_s: float
    predicted_step_s: float
    foretold_step_s: float | None  # when it was on its way from another layout; None: it started here

    def to_dict(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "layout": self.layout.to_dict(),
            "measured_step_s": self.measured_step_s,
            "predicted_step_s": self.predicted_step_s,
            "foretold_step_s": self.foretold_step_s,
        }


@dataclass(frozen=True)
class DemoResult:
    jobs: tuple[JobResult, ...]
    moves: tuple[MoveResult, ...]
    problems: tuple[str, ...]  # failed moves, faults, events of the script that could not be
    wall_s: float
    cold_restart_s: float | None = None
    predictions: tuple[Prediction, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_abs_loss_diff(self) -> float:
        return max((job.max_abs_loss_diff for job in self.jobs), default=math.inf)

    @property
    def ok(self) -> bool:
        """Every job finished, every move was verified and committed, and no loss differs by more than the bound."""
        finished = len(self.jobs) > 0 and all(job.finished for job in self.jobs)
        return finished and not self.problems and self.max_abs_loss_diff <= BOUND

    def to_dict(self) -> dict[str, Any]:
        return {
            "jobs": [job.to_dict() for job in self.jobs],
            "redeployments": [move.to_dict() for move in self.moves],
            "predictions": [prediction.to_dict() for prediction in self.predictions],
            "max_abs_loss_diff": self.max_abs_loss_diff,
            "cold_restart_s": self.cold_restart_s,
            "problems": list(self.problems),
            "wall_s": self.wall_s,
            "files": dict(self.files),
            "ok": self.ok,
        }
