"""A store that cannot be written for a while, its disk being full: no report is lost, nothing is half done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from world import World

from suika.control import final
from suika.control.database import DatabaseStore
from suika.control.memory_store import MemoryStore
from suika.control.store import News, StoreAwayError
from suika.core.job import Job, JobState
from suika.core.redeployment import Phase, Redeployment
from suika.runtime.events import Ended, Moving, Outcome

WRITES = ("add", "put", "append", "saved", "calibrated", "set_draining")


@contextmanager
def full_disk(store: MemoryStore) -> Iterator[None]:
    """None of the store's writes happens."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreAwayError("the disk is full")

    for name in WRITES:
        setattr(store, name, refuse)
    yield
    for name in WRITES:
        delattr(store, name)


def turn(world: World) -> None:
    """As `World.turn`, which takes a fault for a failed test."""
    for _ in range(4):
        world.controller.turn(0.02)


def test_reports_wait_until_they_can_be_written_down(world: World) -> None:
    run, other = world.start("a", "n0/0", "n0/1"), world.start("b", "n1/0")
    with full_disk(world.store):
        run.saved(40)
        run.steps(9)
        run.ended(Outcome.FINISHED)
        other.saved(7)
        other.ended(Outcome.LOST, saved=7)
        turn(world)
        assert world.job("a").state is world.job("b").state is JobState.RUNNING
    turn(world)
    assert world.job("a").state is JobState.FINISHED
    assert world.job("b").state is JobState.QUEUED
    kinds = world.kinds("a")
    assert kinds.index("snapshot") < kinds.index("job-finished")
    assert kinds.count("job-finished") == 1
    assert not world.controller.state.watch(world.job("a").id).held


def test_a_report_that_cannot_be_written_whole_is_not_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss whose last event does not fit any more: taken in again later, it must not count twice."""
    store = DatabaseStore(f"sqlite:///{tmp_path}/suika.db")
    world, append = World(tmp_path, store=store), store.append
    run = world.start("a", "n0/0")

    def refuse(at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Any:
        if kind == "recovering":
            raise StoreAwayError("the disk is full")
        return append(at_s, kind, job_id, **data)

    monkeypatch.setattr(store, "append", refuse)
    run.ended(Outcome.LOST)
    turn(world)
    assert (world.job("a").state, world.job("a").num_recoveries) == (JobState.RUNNING, 0)
    assert "job-recovering" not in world.kinds("a")
    monkeypatch.undo()
    turn(world)
    assert world.job("a").num_recoveries == 1
    assert world.kinds("a").count("job-recovering") == world.kinds("a").count("recovering") == 1
    world.controller.close()
    store.close()


@pytest.fixture
def stopping(tmp_path: Path) -> Iterator[tuple[World, list[bool]]]:
    """A world whose database refuses every commit while the flag is set."""
    store, full = DatabaseStore(f"sqlite:///{tmp_path}/suika.db"), [False]

    @event.listens_for(store.engine, "commit")
    def refuse(_: Any) -> None:
        if full[0]:
            raise OperationalError("COMMIT", {}, Exception("database or disk is full"))

    world = World(tmp_path, store=store)
    yield world, full
    world.controller.close()
    store.close()


def test_a_final_checkpoint_is_delivered_once(
    stopping: tuple[World, list[bool]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job's end is taken in again and again while nothing can be written; two deliveries would spoil each other."""
    world, full = stopping
    snapshot, delivered = tmp_path / "snapshot", []
    snapshot.mkdir()
    (snapshot / "manifest.json").write_text("{}")
    real = final.deliver
    monkeypatch.setattr(final, "deliver", lambda *given: (delivered.append(given), real(*given))[1])
    run = world.start("a", "n0/0", final_checkpoint=str(tmp_path / "done"))
    run.step, full[0] = 100, True
    run.on_event(Ended(run.job_id, run.generation, Outcome.FINISHED, 100, str(snapshot), 100))
    turn(world)
    assert not delivered
    full[0] = False
    deadline = time.monotonic() + 20
    while world.job("a").state is JobState.RUNNING and time.monotonic() < deadline:
        turn(world)
    assert world.job("a").state is JobState.FINISHED
    assert len(delivered) == world.kinds("a").count("final-checkpoint") == 1


def test_decisions_wait_on_until_it_is_written_that_they_are_void(stopping: tuple[World, list[bool]]) -> None:
    world, full = stopping
    run = world.start("a", "n0/0", "n0/1")
    world.submit("b")
    world.policy.next = [world.grant("a", "n1/0", "n1/1"), world.grant("b", "n0/0")]
    turn(world)
    state, watch = world.controller.state, world.controller.state.watch(world.job("a").id)
    assert [waiting.after for waiting in state.waiting] == [{world.job("a").id}]
    assert run.move is not None
    plan, generation, reason = run.move[:3]
    record = Redeployment(run.job_id, generation, run.plan, plan, reason, Phase.ABORTED, error="no room")
    full[0] = True
    run.on_event(Moving(run.job_id, run.generation, record))
    turn(world)
    assert (world.job("a").state, watch.failed_moves, len(state.waiting)) == (JobState.REDEPLOYING, 0, 1)
    full[0] = False
    turn(world)
    assert (world.job("a").state, watch.failed_moves, len(state.waiting)) == (JobState.RUNNING, 1, 0)
    assert world.kinds("a").count("move-failed") == world.kinds("b").count("decision-cancelled") == 1


@pytest.mark.parametrize("what", ["start", "move", "stop"])
def test_what_cannot_be_written_is_not_begun(world: World, what: str) -> None:
    run = world.start("a", "n0/0")
    world.submit("b")
    state = world.controller.state
    decisions = {
        "start": world.grant("b", "n0/1"),
        "move": world.grant("a", "n1/0", "n1/1"),
        "stop": world.preempt("a"),
    }
    world.policy.next = [decisions[what]]
    world.controller.actor.decide()
    assert len(state.waiting) == 1
    with full_disk(world.store):
        turn(world)
        held = {str(device) for watch in state.watches.values() for device in watch.held}
        assert (held, state.releasing, state.waiting) == ({"n0/0"}, {}, [])
    turn(world)
    assert [asked[0] for asked in run.asked] == ["start"]
    assert (world.job("a").state, world.job("b").state) == (JobState.RUNNING, JobState.QUEUED)
    assert len(world.policy.seen) >= 2, "it is decided about anew"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[tuple[DatabaseStore, list[int]]]:
    """SQLite on a disk that can be made full: a limit on the file's pages, by connection."""
    store, pages = DatabaseStore(f"sqlite:///{tmp_path}/suika.db"), [1 << 30]

    @event.listens_for(store.engine, "begin")
    def limit(connection: Any) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages[0]}")

    yield store, pages
    store.close()


def test_a_full_database_takes_back_what_it_could_not_write(small: tuple[DatabaseStore, list[int]]) -> None:
    from conformance import spec

    store, pages = small
    store.add(Job("j1", spec("a"), 1.0), News(1.0, "submitted", {}))
    before = (store.jobs(), store.events(), store.heads())
    pages[0] = 1

    def fill() -> None:
        for number in range(1000):
            store.append(2.0, "large", "j1", text="x" * 100_000, number=number)

    with pytest.raises(StoreAwayError, match="full"):
        fill()
    written = len(store.events())
    with pytest.raises(StoreAwayError):
        store.add(Job("j2", spec("b" * 60, steps=7), 2.0), News(2.0, "submitted", {"body": "x" * 1_000_000}))
    assert (store.jobs(), store.heads()) == (before[0], before[2])
    pages[0] = 1 << 30
    store.append(3.0, "goes-on")
    assert [event.seq for event in store.events()] == list(range(1, written + 2))


def test_a_drain_that_cannot_be_written_whole_is_not_half_begun(small: tuple[DatabaseStore, list[int]]) -> None:
    store, pages = small
    store.set_draining(frozenset({"n0"}))
    pages[0] = 1

    def begin() -> None:
        with store.together():
            store.set_draining(frozenset({"n0", "n1"}))
            store.append(2.0, "node-draining", node="n1", text="x" * 1_000_000)

    with pytest.raises(StoreAwayError):
        begin()
    assert store.draining() == {"n0"}
    pages[0] = 1 << 30
    with store.together():
        store.set_draining(frozenset())
        store.append(3.0, "node-returned", node="n0")
    assert store.draining() == set()
