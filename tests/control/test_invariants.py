"""Random histories, seeded: in whatever order things happen, no device has two owners and every job comes to an end."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from world import FakeRun, World

from suika.core.cluster import Device
from suika.core.errors import SpecError
from suika.core.job import ENDED, TRANSITIONS, JobState
from suika.runtime.events import Outcome
from suika.schedule.policies import load


def at_once(action: Callable[..., Any], *arguments: Any) -> Future:
    done: Future = Future()
    done.set_result(action(*arguments))
    return done


class History:
    """A world whose runs obey, fail and die at random."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = World(folder, load("suika"))
        self.world.controller.actor.background = at_once
        self.num_jobs = 0
        self.snapshots: dict[str, int] = {}

    def runs(self) -> list[FakeRun]:
        return [run for run in self.world.runs.values() if not run.closed]

    def holds(self, run: FakeRun) -> set[Device]:
        """Devices on which the run has processes: from the command on, until it says that they are gone."""
        held: set[Device] = set()
        for command in run.asked:
            if command[0] == "start":
                held = set(command[1].devices)
            elif command[0] == "redeploy":
                held |= set(command[1].devices)
            elif command[0] == "keep":
                held = set(command[1])
        return held

    def happen(self) -> None:
        """One thing, of those that can happen now."""
        choices: list[Callable[[], object]] = [self.submit, self.drain, self.wait, self.wait]
        for run in self.runs():
            waits = [command[0] for command in run.asked if command[0] != "keep"]
            doing = waits[-1] if waits else None
            held = self.holds(run)
            if not held:
                continue
            choices += [
                lambda run=run: self.lose(run),
                lambda run=run: self.cancel(run),
                lambda run=run: self.resize(run),
            ]
            if doing == "start":
                choices += [lambda run=run: self.start(run)] * 4
            elif doing == "redeploy":
                choices += [lambda run=run: self.move(run)] * 4 + [lambda run=run: self.abort(run)]
            elif doing == "preempt":
                choices += [lambda run=run: self.end(run, Outcome.PREEMPTED)] * 4
            elif doing == "kill":
                choices += [lambda run=run: self.end(run, Outcome.KILLED)] * 8
            else:
                choices += [lambda run=run: run.steps(3)] * 3
            if run.step:
                choices.append(lambda run=run: self.end(run, Outcome.FINISHED))
        self.random.choice(choices)()

    def submit(self) -> None:
        self.num_jobs += 1
        low = self.random.randint(1, 3)
        self.world.submit(f"job-{self.num_jobs}", devices={"min": low, "max": self.random.randint(low, 4)})

    def drain(self) -> None:
        draining = self.world.store.draining()
        if draining:
            self.world.api.drain(min(draining), undo=True)
        else:
            self.world.api.drain(self.random.choice(("n0", "n1")))

    def wait(self) -> None:
        self.world.now += self.random.uniform(0.1, 8.0)

    def start(self, run: FakeRun) -> None:
        run.asked.append(("running",))
        run.started(self.snapshots.get(run.job_id, 0) + 1)

    def move(self, run: FakeRun) -> None:
        old = set(run.plan.devices)
        if run.moved(release=False):
            run.asked += [("running",), ("keep", run.plan.devices)]
            run.released(old - set(run.plan.devices))
        else:
            run.asked += [("running",), ("keep", old)]

    def abort(self, run: FakeRun) -> None:
        run.asked += [("running",), ("keep", run.plan.devices)]
        run.aborted("at random")

    def lose(self, run: FakeRun) -> None:
        dead = self.random.choice(sorted(self.holds(run)))
        self.end(run, Outcome.LOST, dead=(dead,))

    def end(self, run: FakeRun, outcome: Outcome, dead: tuple[Device, ...] = ()) -> None:
        saved = run.step if outcome is Outcome.PREEMPTED else self.snapshots.get(run.job_id, 0)
        self.snapshots[run.job_id] = saved
        run.asked += [("running",), ("keep", ())]
        run.ended(outcome, saved=saved, dead=dead)

    def cancel(self, run: FakeRun) -> None:
        if self.world.store.job(run.job_id).state not in ENDED:
            self.world.api.cancel(run.job_id)

    def resize(self, run: FakeRun) -> None:
        job = self.world.store.job(run.job_id)
        if job.state in ENDED:
            return
        wishes = ({"devices": "1:4"}, {"devices": "2"}, {"layout": "tp=2,pp=2"}, {"layout": "dp=3"}, {"layout": "tp=3"})
        try:
            self.world.api.resize(run.job_id, **self.random.choice(wishes))
        except SpecError:
            assert job == self.world.store.job(run.job_id)  # refused: nothing changed

    def check(self) -> None:
        for _ in range(3):
            self.world.controller.turn()
            owners: dict[Device, str] = {}
            for run in self.runs():
                for device in self.holds(run):
                    assert owners.setdefault(device, run.job_id) == run.job_id, f"{device} has two owners"
        faults = [event.data for event in self.world.store.events() if event.kind == "controller-fault"]
        assert not faults, faults
        for job in self.world.store.jobs():
            assert job.generation <= job.last_generation
            assert (job.plan is not None) or job.state not in (
                JobState.RUNNING,
                JobState.STARTING,
                JobState.REDEPLOYING,
            )

    def settle(self) -> None:
        """From here on all goes well: everything has to come to an end."""
        for node in self.world.store.draining():
            self.world.api.drain(node, undo=True)
        for job in self.world.controller.state.active():
            self.world.api.resize(job.id, devices="1:4")
        for _ in range(60 * max(self.num_jobs, 1)):
            self.world.now += 5.0
            self.check()
            busy = [run for run in self.runs() if self.holds(run)]
            if not busy and not self.world.controller.state.active():
                return
            for run in busy:
                doing = [command[0] for command in run.asked if command[0] != "keep"][-1]
                if doing == "start":
                    self.start(run)
                elif doing == "redeploy":
                    self.move(run)
                else:
                    self.end(run, {"preempt": Outcome.PREEMPTED, "kill": Outcome.KILLED}.get(doing, Outcome.FINISHED))
        left = [(job.spec.name, job.state, job.reason.sentence) for job in self.world.controller.state.active()]
        raise AssertionError(f"never ended: {left}")


@pytest.mark.parametrize("seed", range(25))
def test_any_history(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    for _ in range(120):
        history.happen()
        history.check()
    history.settle()
    store = history.world.store
    assert all(job.state in ENDED for job in store.jobs())
    assert not history.world.controller.state.releasing
    assert not history.world.controller.state.waiting
    # Each job's states, as its events tell them, are a walk through the table of transitions.
    for job in store.jobs():
        walk = ["queued", *(e.kind[4:] for e in store.events(job_id=job.id) if e.kind.startswith("job-"))]
        edges = {(str(a), str(b)) for a, b in TRANSITIONS}
        assert all(pair in edges for pair in pairwise(walk)), walk
        assert walk[-1] == job.state
    history.world.controller.close()
