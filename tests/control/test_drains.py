"""A node is emptied by its deadline: live, then with state saved; what is left is said, and survives a restart."""

from __future__ import annotations

from typing import Any

import pytest
from world import World

from suika.control.drains import Drains
from suika.core.errors import SpecError
from suika.core.job import JobState
from suika.runtime.events import Outcome


def drain_of(world: World, node: str = "n0") -> dict:
    return next(row["drain"] for row in world.api.nodes() if row["name"] == node)


def test_an_empty_node_is_drained_at_once(world: World) -> None:
    assert drain_of(world) is None
    row = world.api.drain("n0", deadline_s=600)
    assert row["drain"]["state"] == "drained"
    world.turn()
    assert world.kinds().count("node-drained") == 1
    world.turn(5)
    assert world.kinds().count("node-drained") == 1
    assert world.api.drain("n0", undo=True)["drain"] is None


def test_a_job_that_leaves_live_is_not_stopped(world: World) -> None:
    run = world.start("train", "n0/0", "n0/1")
    world.api.drain("n0", deadline_s=600)
    world.turn(10)
    assert drain_of(world)["left"][0]["name"] == "train"
    world.decide(world.grant("train", "n1/0", "n1/1"))
    assert drain_of(world)["left"][0]["why"] == "it is being moved"
    assert run.moved()
    world.turn()
    assert drain_of(world)["state"] == "drained"
    assert ("preempt",) not in [asked[:1] for asked in run.asked]


def test_shortly_before_the_deadline_state_is_saved(world: World) -> None:
    run = world.start("train", "n0/0", "n0/1")
    command = world.start_command("gang", "n0/2", preemption={"grace_s": 100})
    world.api.drain("n0", deadline_s=600)
    world.turn(490)
    assert [asked[0] for asked in (run.asked[-1], command.asked[-1])] == ["start", "start"]
    world.turn(10)  # a command needs its grace
    assert command.asked[-1] == ("preempt", 95.0)
    world.turn(40)
    assert run.asked[-1] == ("preempt", 55.0)
    assert world.job("train").reason.code == "drain"
    run.ended(Outcome.PREEMPTED, saved=7)
    command.ended(Outcome.PREEMPTED)
    world.turn()
    assert drain_of(world)["state"] == "drained"
    assert {world.job(name).state for name in ("train", "gang")} == {JobState.QUEUED}


def test_what_could_not_leave_is_said_and_not_forced(world: World) -> None:
    run = world.start_command("gang", "n0/0", preemption={"policy": "never"})
    world.api.drain("n0", deadline_s=60)
    world.turn(61)
    drain = drain_of(world)
    assert drain["state"] == "late"
    assert (drain["left"][0]["name"], drain["left"][0]["why"]) == ("gang", "its user does not let it be stopped")
    assert world.job("gang").state is JobState.RUNNING
    (late,) = [event for event in world.store.events() if event.kind == "drain-late"]
    assert late.data["left"] == [{"job_id": world.job("gang").id, "why": "its user does not let it be stopped"}]
    run.ended(Outcome.FINISHED, exit_code=0)
    world.turn()
    assert drain_of(world)["state"] == "drained"


def test_the_deadline_is_on_record(world: World) -> None:
    world.start("train", "n0/0")
    world.api.drain("n0")
    world.api.drain("n0", deadline_s=600)
    again = Drains(world.controller.state, lambda *_: None)
    assert again.row("n0") == drain_of(world)
    assert again.row("n0")["until_s"] == world.now + 600


def test_what_was_told_is_not_told_again_after_a_restart(world: World) -> None:
    world.start_command("gang", "n1/0", preemption={"policy": "never"})
    world.api.drain("n0", deadline_s=60)
    world.api.drain("n1", deadline_s=60)
    world.turn(61)
    before = world.kinds()
    assert (before.count("node-drained"), before.count("drain-late")) == (1, 1)
    Drains(world.controller.state, lambda *_: None).look()
    assert world.kinds() == before
    world.api.drain("n0", deadline_s=60)  # a drain of its own: its end is told
    Drains(world.controller.state, lambda *_: None).look()
    assert world.kinds().count("node-drained") == 2


def test_after_a_restart_the_record_is_read_once_for_all_nodes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, deadline_s in (("n0", 60.0), ("n1", 90.0), ("n0", 70.0)):
        world.api.drain(node, deadline_s=deadline_s)
    asked, events = [], world.store.events

    def counted(*arguments: Any) -> Any:
        asked.append(arguments)
        return events(*arguments)

    monkeypatch.setattr(world.store, "events", counted)
    drains = Drains(world.controller.state, lambda *_: None)
    assert [drains.row(node)["until_s"] for node in ("n0", "n1")] == [world.now + 70.0, world.now + 90.0]
    assert len(asked) == 2, "a page, and the end"
    world.store.set_draining(frozenset())
    Drains(world.controller.state, lambda *_: None)
    assert len(asked) == 2, "nobody drains: nothing to look for"


@pytest.mark.parametrize("deadline_s", [0, -1, float("nan"), float("inf"), "10m", True, 1e12])
def test_odd_deadlines(world: World, deadline_s: object) -> None:
    with pytest.raises(SpecError, match="deadline_s"):
        world.api.drain("n0", deadline_s=deadline_s)
    with pytest.raises(SpecError, match="deadline_s"):
        world.api.drain("n0", undo=True, deadline_s=5)
    assert drain_of(world) is None
