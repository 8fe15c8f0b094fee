"""The coordinator's part of copies, over holders that are played: what counts, what was given up, who is let go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from suika.runtime.adopt import OnRecord, join_copies, take_back
from suika.runtime.coordinator import JobRun
from suika.runtime.copies import Copies
from suika.runtime.copysets import Lineage
from suika.runtime.events import Ended, JobEvent, Outcome
from suika.runtime.gang import Gang, Limits
from suika.runtime.messages import Message
from suika.runtime.rooms import NodeMemory, Rooms

from .conftest import CLUSTER, USER, plan, spec

Listener = Callable[[Message], None]
ONE_RANK = ("tp=1,pp=1,dp=1", "a0")


class Played:
    """Processes of the nodes a and b: holders answer, and say what they `have`; ranks and stores die."""

    def __init__(self) -> None:
        memory = dict.fromkeys("ab", NodeMemory(1 << 40, 1 << 39, 1 << 38))
        self.rooms = Rooms(lambda: memory)
        self.have: dict[str, list[dict[str, Any]]] = {}
        self.sent: list[tuple[str, Message]] = []
        self.killed: list[str] = []
        self.late: list[tuple[str, int]] | None = None  # reports that wait, if they do
        self._listeners: dict[str, Listener] = {}

    def claim(self, process: str, listener: Listener) -> None:
        self._listeners[process] = listener

    def spawn(self, process: str, node: str, entry: str, launch: Any, listener: Listener) -> None:
        self.claim(process, listener)
        listener({"event": "forked", "process": process, "pid": 1})
        if ".holder." in process:
            self._holding(process, 0)
        else:
            threading.Timer(0.1, self.kill, (process,)).start()  # no start comes further

    def send(self, process: str, message: Message) -> None:
        self.sent.append((process, message))
        if message["do"] == "report" and self.late is not None:
            self.late.append((process, message["request"]))
        elif message["do"] == "report":
            self.answer(process, message["request"])

    def answer(self, process: str, request: int) -> None:
        for held in self.have.get(process, []):
            self.say(process, "held", **held)
        self._holding(process, request)

    def say(self, process: str, word: str, **content: Any) -> None:
        message = {"say": word, "generation": 0, **content}
        self._listeners[process]({"event": "message", "process": process, "message": message})

    def _holding(self, process: str, request: int) -> None:
        address = {"host": "h", "port": 1, "line": "l", "token": "t"}
        self.say(process, "holding", num_bytes=0, request=request, **address)

    def kill(self, process: str) -> None:
        self.killed.append(process)
        if (listener := self._listeners.pop(process, None)) is not None:
            listener({"event": "exit", "process": process, "code": -9})

    def ping(self, processes: Any) -> None: ...

    def unanswered_s(self, process: str) -> float:
        return 0.0


def held(generation: int, step: int, rank: int, layout: tuple[str, str], copied: bool = False) -> dict[str, Any]:
    """A share of a layout none of whose state lies on one node alone."""
    meta = {"plan": plan(*layout, spec()).to_dict(), "records": {}}
    about = {"generation": generation, "step": step, "rank": rank, "copied": copied, "alone": 0}
    return about | {"num_bytes": 10, "stall_s": 0.0, "meta": meta}


@pytest.mark.parametrize("coordinator", ["the same", "a new one"])
def test_a_start_from_disk_that_fails_brings_no_given_up_past_back(tmp_path: Path, coordinator: str) -> None:
    """Generation 3 had come to step 300 on a node that was cut off; generation 5 went on from the disk's step 80 to
    100. The node comes back while the job waits to start from there."""
    processes, events = Played(), list[JobEvent]()
    job = spec(memory_copy_every_steps=10)
    limits = Limits(silent_s=2, answer_s=2, launch_s=5)
    run = JobRun("j", job, processes, CLUSTER, tmp_path, "", events.append, limits=limits)
    if coordinator == "the same":
        run.command(lambda: (run.copies.begin(5, 80, None), run.copies.end())).result(5)
    run.keeper.newest = ("/disk/100", 100)
    processes.have["j.holder.b.x"] = [held(3, 300, 0, ONE_RANK)]
    join_copies(run, {"j.holder.b.x": "b"}, processes.claim).result(5)
    with pytest.raises(Exception, match="is gone"):
        run.start(plan(*ONE_RANK, job), 9, "/disk/100").result(20)
    run.close()
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert (ended.snapshot, ended.snapshot_step) == ("/disk/100", 100)


@pytest.mark.parametrize(
    ("source", "goes_on_from"),
    [((3, 110), ("memory:3/110", 110)), (None, ("/disk/80", 80))],
    ids=["named", "not named"],
)
def test_what_a_job_was_started_from_stays_its_own_under_a_new_coordinator(
    tmp_path: Path, source: tuple[int, int] | None, goes_on_from: tuple[str, int]
) -> None:
    """It was started from the copies of step 110 of generation 3, and loses its rank before the next copy is made. Who
    is not told what that start was from must take them for another past."""
    processes, events = Played(), list[JobEvent]()
    run = JobRun("j", spec(memory_copy_every_steps=10), processes, CLUSTER, tmp_path, "", events.append)
    record = OnRecord(plan(*ONE_RANK, spec()), 5, 115, USER, ("/disk/80", 80), Lineage(5, source))
    processes.have["j.holder.b.x"] = [held(3, 110, 0, ONE_RANK)]
    take_back(run, record, {"j.5.a/0": 1, "j.holder.b.x": 1}, processes.claim).result(5)
    processes.kill("j.5.a/0")
    deadline = time.monotonic() + 20
    while not any(isinstance(event, Ended) for event in events):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    run.close()
    ended = next(event for event in events if isinstance(event, Ended))
    assert (ended.outcome, ended.step) == (Outcome.LOST, 115)
    assert (ended.snapshot, ended.snapshot_step) == goes_on_from


def _copies(processes: Played, emit: Callable[[JobEvent], None]) -> tuple[Copies, Gang]:
    gang = Gang("j", processes, lambda member, message: None, Limits())
    copies = Copies("j", spec(memory_copy_every_steps=10), processes, gang, emit)
    gang.hear_other = copies.hear
    return copies, gang


def test_nobody_is_let_go_before_it_has_said_what_it_holds() -> None:
    """After a move, under a new coordinator: the newest set lies where the job is no more, and the first step is heard
    before what the holders say."""
    processes = Played()
    copies, gang = _copies(processes, lambda event: None)
    before = ("tp=2,pp=1,dp=1", "a0 a1")
    found = {"j.holder.a.x": "a", "j.holder.a.y": "a"}
    for rank, process in enumerate(found):
        processes.claim(process, gang.post)
        processes.have[process] = [held(5, 110, rank, before)]
    copies.take_back(found, Lineage(5))
    processes.late = []
    copies.welcome()
    after = plan("tp=1,pp=1,dp=1", "b0", spec())
    copies.stepped(115, 6, after, {})
    assert processes.killed == []
    for process, request in processes.late:
        processes.answer(process, request)
    gang.drain()
    copies.stepped(116, 6, after, {})
    assert processes.killed == []
    best = copies.best_known()
    assert best is not None
    assert best.key == (5, 110)


def test_a_copy_that_is_under_way_at_a_good_end_is_no_trouble() -> None:
    events = list[JobEvent]()
    copies, gang = _copies(Played(), events.append)
    copies.begin(5, 0, None)
    for step in (1, 2):  # the holders come; then they are asked for a copy
        copies.stepped(step, 5, plan(*ONE_RANK, spec()), {})
        gang.drain()
    assert copies._asked is not None
    copies.end()
    assert events == []
    assert not copies.holders.alive


@pytest.mark.parametrize("over", ["given up", "of another past"])
def test_a_share_that_comes_too_late_is_not_kept(over: str) -> None:
    """It was on its way to the holder, which had nothing to drop when it was told so."""
    processes = Played()
    copies, gang = _copies(processes, lambda event: None)
    before = ("tp=2,pp=1,dp=1", "a0 b0")
    copies.begin(5, 0, None)
    copies.stepped(1, 5, plan(*before, spec()), {})
    gang.drain()
    first, second = copies.holders.alive
    processes.say(first, "held", **held(5, 10, 0, before))
    gang.drain()
    assert [one.key for one in copies._sets] == [(5, 10)]
    if over == "given up":
        copies.stepped(2, 5, plan(*before, spec()), {})
        copies.complain({"generation": 5, "error": "no memory"})
    else:
        copies.forsake(6)
    processes.sent.clear()
    processes.say(second, "held", **held(5, 10, 1, before))
    gang.drain()
    assert processes.sent == [(second, {"do": "drop", "job_id": "j", "before": (0, 0), "sets": [(5, 10)]})]
    assert list(copies._sets) == []
