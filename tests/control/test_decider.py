"""Decisions in a process of their own: the same as here, one process after the other; events wait for the next one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from world import World

from suika.control import controller, frames
from suika.control.compute import ComputeError
from suika.control.decider import DecisionProcess, decide_here
from suika.control.pricing import EstimatedPricing
from suika.control.views import take_snapshot
from suika.core.errors import SpecError
from suika.core.quota import Quota
from suika.core.snapshot import Snapshot
from suika.schedule.policies import load


@pytest.fixture(scope="module")
def process() -> Iterator[DecisionProcess]:
    process = DecisionProcess("suika")
    assert process.is_up(60.0)
    yield process
    process.close()


def snapshots(folder: Path) -> list[Snapshot]:
    """A growing queue on eight devices, and one job that holds some."""
    world, found = World(folder), []
    pricing = EstimatedPricing(world.cluster)
    world.start("first", "n0/0", "n0/1")
    for number in range(3):
        world.submit(f"more-{number}", devices={"min": 1 + number, "max": 4})
        found.append(take_snapshot(world.controller.state, pricing))
    return found


def test_it_decides_as_it_would_be_decided_here(process: DecisionProcess, tmp_path: Path) -> None:
    here = decide_here(load("suika"))
    for snapshot in snapshots(tmp_path):
        there, expected = process(snapshot), here(snapshot)
        assert there.steps == expected.steps
        assert there.rejected == expected.rejected
        assert there.waits == dict(expected.waits)
    assert expected.steps


def test_a_policy_may_be_given_parameters_in_a_live_cluster(tmp_path: Path) -> None:
    process = DecisionProcess("suika:repay=2,residency=600.0")
    try:
        assert process.is_up(60.0)
        here = decide_here(load("suika", repay=2, residency=600.0))
        snapshot = snapshots(tmp_path)[-1]
        assert process(snapshot).steps == here(snapshot).steps
    finally:
        process.close()
    with pytest.raises(SpecError, match="unknown parameters"):
        DecisionProcess("suika:repays=2")
    with pytest.raises(SpecError, match="key=number"):
        DecisionProcess("suika:repay")


def test_another_process_takes_the_place_of_one_that_died(process: DecisionProcess, tmp_path: Path) -> None:
    snapshot = snapshots(tmp_path)[-1]
    before = process(snapshot)
    pid = process.pid
    os.kill(pid, signal.SIGKILL)
    assert process(snapshot).steps == before.steps  # decided here, while another process comes up
    assert process.pid != pid
    assert process.is_up(60.0)
    assert process(snapshot).steps == before.steps


def test_a_process_that_hangs_is_not_waited_for(
    process: DecisionProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before it is asked, so that not even the question is taken; a large one, more than a pipe holds."""
    monkeypatch.setattr(frames, "_STILL_S", 1.0)
    snapshot = snapshots(tmp_path)[-1]
    expected, pid = process(snapshot).steps, process.pid
    os.kill(pid, signal.SIGSTOP)
    large = replace(snapshot, quotas={f"tenant-{number}": Quota(max=number) for number in range(10_000)})
    began_s = time.monotonic()
    assert process(large).steps == expected
    assert time.monotonic() - began_s < 20.0
    assert process.pid != pid
    assert process.is_up(60.0)
    assert process(large).steps == expected


def test_a_fault_of_the_policy_is_told_and_the_next_cycle_goes_on(process: DecisionProcess, tmp_path: Path) -> None:
    snapshot = snapshots(tmp_path)[-1]
    with pytest.raises(ComputeError, match="Error"):
        process(replace(snapshot, jobs=(None,)))
    assert process(snapshot).steps


def test_a_long_cycle_is_followed_by_a_rest_as_long(world: World) -> None:
    """A cluster of thousands that starts has news all the time: reports and requests get half of it."""
    actor, world.controller.state.clock = world.controller.actor, time.monotonic
    decide, ended_s = actor.decide, []

    def slow() -> Any:
        time.sleep(0.3)
        result = decide()
        ended_s.append(time.monotonic())
        world.controller.state.changed = True
        return result

    actor.decide = slow  # type: ignore[method-assign]
    until_s, turns = time.monotonic() + 20.0, 0
    while len(ended_s) < 3:
        assert time.monotonic() < until_s
        world.controller.turn(0.02)
        turns += 1
    assert turns > 2 * len(ended_s)
    assert all(later - earlier > 0.55 for earlier, later in pairwise(ended_s))
    actor.decide = decide  # type: ignore[method-assign]


def test_what_happens_during_a_cycle_is_decided_together_in_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten submissions while a cycle is under way: all are answered at once, and one more cycle sees them all."""
    monkeypatch.setattr(controller, "LONG_CYCLE_S", 60.0)  # the world's clock stands: a rest would never end
    actor, seen = world.controller.actor, []
    working, go_on, decide = threading.Event(), threading.Event(), actor.cycle

    def slow(snapshot: Snapshot) -> Any:
        seen.append([job.id for job in snapshot.jobs])
        if len(seen) == 1:
            working.set()
            assert go_on.wait(20)
        return decide(snapshot)

    actor.cycle = slow
    first = world.submit("first")
    world.controller.start()
    try:
        assert working.wait(20)
        later = [world.submit(f"later-{number}") for number in range(10)]  # each is answered: no cycle ends meanwhile
        go_on.set()
        world.controller.call(lambda: None)
        world.controller.call(lambda: None)
    finally:
        go_on.set()
        world.controller.close()
    assert seen[0] == [first]
    assert set(seen[1]) == {first, *later}
    assert len(seen) == 2
