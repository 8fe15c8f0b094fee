"""`LiveJob`: a job in the system: how far it is, what it holds, and what policies see of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from suika.core.cluster import Device
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import JobView
from suika.simulate.jobs import Record, SimJob

NOTHING = np.empty(0, dtype=np.int64)


@dataclass
class LiveJob:
    """While a move is in flight, `positions` and `layout` are already the new ones: the job goes on at `old_rate` until
    `begin_s`, stands still until `moving_until_s`, and goes on at `rate`."""

    number: int
    job: SimJob
    record: Record
    view: JobView
    done: float = 0.0
    touched_s: float = 0.0  # when `done` was brought up to date
    rate: float = 0.0  # true steps/s
    old_rate: float = 0.0
    begin_s: float = 0.0
    moving_until_s: float = 0.0
    left_alone_until_s: float = 0.0  # after failed moves
    num_tries: int = 0  # moves begun, failed ones included
    num_failed: int = 0  # of the last tries in a row
    positions: np.ndarray = field(default_factory=lambda: NOTHING)  # of the devices that it holds
    layout: Layout | None = None
    version: int = 0  # of what it holds; events of older versions are void
    last_change_s: float | None = None

    # -- how far it is -----------------------------------------------------------------------------------------------

    def done_at(self, now_s: float) -> float:
        before = max(min(now_s, self.begin_s) - self.touched_s, 0.0) * self.old_rate
        after = max(now_s - max(self.touched_s, self.moving_until_s), 0.0) * self.rate
        return self.done + before + after

    def end_s(self) -> float:
        """When it will have done all its steps, if nothing changes."""
        left = self.job.num_steps - self.done
        before = max(self.begin_s - self.touched_s, 0.0) * self.old_rate
        if before >= left:
            return self.touched_s + left / self.old_rate
        return max(self.touched_s, self.moving_until_s) + (left - before) / self.rate

    def touch(self, now_s: float) -> None:
        """Bring its progress and its account up to now."""
        self.done = min(self.done_at(now_s), self.job.num_steps)
        self.record.device_s += len(self.positions) * (now_s - self.touched_s)
        self.touched_s = now_s

    # -- what holds it up --------------------------------------------------------------------------------------------

    def charge_pause(self, pause_s: float) -> None:
        self.record.paused_s += pause_s
        self.record.paused_device_s += pause_s * len(self.positions)

    def break_off(self, now_s: float) -> None:
        """Take what a move in flight will not take any more off its account."""
        rest_s = max(self.moving_until_s - max(now_s, self.begin_s), 0.0)
        self.charge_pause(-rest_s)
        if rest_s and self.record.changes:
            last = self.record.changes[-1]
            last.until_s = max(min(last.until_s, now_s), last.begin_s)

    def stand_still(self, now_s: float) -> None:
        """From now on, without devices."""
        self.old_rate = self.rate = 0.0
        self.begin_s = self.moving_until_s = now_s

    # -- what policies see of it -------------------------------------------------------------------------------------

    def is_moving(self, now_s: float) -> bool:
        return self.moving_until_s > now_s

    def is_left_alone(self, now_s: float) -> bool:
        return self.left_alone_until_s > now_s

    def show(self, now_s: float, devices: tuple[Device, ...], remaining_steps: float, interruptible: bool) -> None:
        """Make `view` the job as it is now. It stays true until something happens to the job.

        `devices` are those of `positions`, `remaining_steps` is what policies are told; moves in flight may be
        `interruptible`.
        """
        moving, left_alone = self.is_moving(now_s), self.is_left_alone(now_s)
        self.view = replace(
            self.view,
            state=(JobState.REDEPLOYING if moving else JobState.RUNNING) if devices else JobState.QUEUED,
            remaining_steps=remaining_steps,
            done_steps=self.done,
            started_s=self.record.first_start_s,
            layout=self.layout,
            devices=devices,
            observed_step_s=1.0 / self.rate if self.rate and not moving else None,
            moving_until_s=self.left_alone_until_s if left_alone else self.moving_until_s if moving else None,
            interruptible=moving and not left_alone and interruptible,
            attained_device_s=self.record.device_s,
            last_change_s=self.last_change_s,
            num_moves=self.record.num_moves,
            has_state=self.record.first_start_s is not None,
            as_of_s=now_s,
        )
