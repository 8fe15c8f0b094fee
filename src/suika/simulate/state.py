"""`State`: the simulated cluster and its jobs at the present instant, and what is yet to come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from suika.core.snapshot import Snapshot
from suika.simulate.agenda import ARRIVED, END, FAILED, RELEASED, SETTLED, SLOWED, Agenda
from suika.simulate.devices import Devices
from suika.simulate.jobs import Record
from suika.simulate.live import NOTHING, LiveJob
from suika.simulate.world import Outcome, World


class State:
    """What events and decisions change, and the few ways in which both change it. `on_end` is told how many jobs are
    left."""

    def __init__(self, world: World, on_end: Callable[[int], None] | None = None) -> None:
        self.world = world
        self.now_s = 0.0
        self.agenda = Agenda()
        self.devices = Devices(world.cluster, len(world.jobs))
        self.number_of = {job.id: number for number, job in enumerate(world.jobs)}
        self.live: dict[int, LiveJob] = {}  # by number, in order of submission
        self.left_alone: set[int] = set()  # job numbers, after failed moves
        self.num_left = len(world.jobs)
        self.outcome = Outcome([Record(job) for job in world.jobs])
        self._on_end = on_end
        for number, job in enumerate(world.jobs):
            self.agenda.enter(job.submit_s, ARRIVED, number)
        for failure in world.failures:
            self.agenda.enter(failure.at_s, FAILED, failure)
        for slowdown in world.slowdowns:
            self.agenda.enter(slowdown.at_s, SLOWED, slowdown)

    # -- jobs --------------------------------------------------------------------------------------------------------

    def admit(self, number: int) -> None:
        record = self.outcome.records[number]
        job = record.job
        view = job.first_view(self.world.predictor.curve(job))
        self.live[number] = live = LiveJob(number, job, record, view, touched_s=self.now_s)
        self.refresh(live)

    def dismiss(self, live: LiveJob) -> None:
        """It has done all its steps."""
        self.hold(live, NOTHING)
        live.record.end_s = self.now_s
        self.left_alone.discard(live.number)
        del self.live[live.number]
        self.num_left -= 1
        if self._on_end is not None:
            self._on_end(self.num_left)

    def hold(self, live: LiveJob, positions: np.ndarray, usable_s: float = 0.0) -> None:
        """Give the job exactly `positions`; others may use what it gives up from `usable_s` on."""
        if len(live.positions):
            live.record.spans[-1] = (*live.record.spans[-1][:1], self.now_s, len(live.positions))
        if len(positions):
            live.record.spans.append((self.now_s, self.now_s, len(positions)))
        gives_up = self.devices.give(live, positions)
        if len(gives_up) and usable_s > self.now_s:
            live.record.device_s += len(gives_up) * (usable_s - self.now_s)
            self.devices.release_at(gives_up, usable_s)
            self.agenda.enter(usable_s, RELEASED, gives_up)

    def expect_settled(self, live: LiveJob, at_s: float) -> None:
        """By then its move, or the time for which it is left alone, is over, unless what it holds changes before."""
        self.agenda.enter(at_s, SETTLED, (live.number, live.version))

    def expect_end(self, live: LiveJob) -> None:
        self.agenda.enter(live.end_s(), END, (live.number, live.version))

    def refresh(self, live: LiveJob) -> None:
        """Show policies the job as it is now."""
        if not live.is_left_alone(self.now_s):
            self.left_alone.discard(live.number)
        if live.rate and not live.is_moving(self.now_s):
            self.devices.sample(live.positions)
        devices = self.devices.at(live.positions)
        remaining_steps = self.world.predictor.remaining_steps(live.job, live.done)
        live.show(self.now_s, devices, remaining_steps, self.world.interruptible)

    # -- all of it ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What policies see."""
        # Views that do not stay true as time passes.
        for number in self.live if self.world.predictor.drifts else sorted(self.left_alone):
            live = self.live[number]
            if live.rate and not live.is_moving(self.now_s):
                live.touch(self.now_s)
                self.refresh(live)
        return Snapshot(
            self.now_s,
            self.world.cluster,
            tuple(live.view for live in self.live.values()),
            self.world.move_cost,
            down=self.devices.down,
            promised=self.devices.promised,
            slow=self.devices.slow,
            quotas=self.world.quotas,
        )

    def check(self) -> None:
        """No device has two owners or none that holds it; nobody makes progress without devices."""
        held = self.devices.count()
        assert (held == self.devices.num_held).all(), f"at {self.now_s}: owners and holders disagree"
        assert all(live.rate == 0.0 or len(live.positions) for live in self.live.values())
        self.outcome.busy.append((self.now_s, int(held.sum())))
