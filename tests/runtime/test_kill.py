"""A kill, and a notice, that come while the run has other things to do: none is lost, none hits who starts next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from suika.core.cluster import Device
from suika.core.job import parse_job
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.runtime.adopt import OnRecord, take_back
from suika.runtime.command_run import CommandRun
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Ended, JobEvent, Outcome, Started
from suika.runtime.gang import Limits
from suika.runtime.messages import Message

from .conftest import CLUSTER, USER, plan, spec

Hear = Callable[[Message], None]
COMMAND = parse_job({"name": "gang", "command": ["train"], "devices": {"min": 1, "max": 1}})
GANG = Plan(Layout(dp=1, layers_per_stage=(1,)), Placement((Device("a", 0),)))
TRAINING = plan("tp=1,pp=1,dp=1", "a0", spec())
KINDS = ["training", "command"]


class Scripted:
    """`Processes` without processes: a command's rank says at once what it is waited for."""

    def __init__(self) -> None:
        self.alive: dict[str, Hear] = {}
        self.spawned: list[str] = []

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Hear) -> None:
        self.alive[process] = listener
        self.spawned.append(process)
        is_store = ".store." in process
        self._say(
            process, "store" if is_store else "place", 0 if is_store else int(process.split(".")[1]), host="h", port=1
        )

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        if message["do"] == "start":
            self._say(process, "running", int(process.split(".")[1]), step=0)

    def kill(self, process: str) -> None:
        if listener := self.alive.pop(process, None):
            listener({"event": "exit", "process": process, "code": -9})

    def ping(self, processes: Collection[str]) -> None:
        pass

    def unanswered_s(self, process: str) -> float:
        return 0.0

    def claim(self, process: str, listener: Hear) -> None:
        self.alive[process] = listener

    def _say(self, process: str, say: str, generation: int, **content: Any) -> None:
        message = {"say": say, "generation": generation, **content}
        self.alive[process]({"event": "message", "process": process, "message": message})


class Busy:
    """A run whose thread is held up until `go_on`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.processes = kind, Scripted()
        self.events: queue.Queue[JobEvent] = queue.Queue()
        limits, heard = Limits(launch_s=2.0, end_s=2.0), self.events.put
        self.run: Any = (
            JobRun("j1", spec(), self.processes, CLUSTER, folder, "none", heard, limits=limits)
            if kind == "training"
            else CommandRun("j1", COMMAND, self.processes, CLUSTER, heard, limits)
        )
        self.plan = TRAINING if kind == "training" else GANG
        self._gate = threading.Event()
        self.run.command(lambda: self._gate.wait(10))

    def go_on(self) -> None:
        self._gate.set()

    def take_back(self) -> None:
        record = OnRecord(self.plan, 1, 0, USER)
        found = {"j1.1.a/0": 4711}
        self.processes.alive["j1.1.a/0"] = lambda event: None
        if self.kind == "training":
            take_back(self.run, record, found, self.processes.claim)
        else:
            self.run.take_back(record, found, self.processes.claim)

    def wait(self, kind: type) -> Any:
        while not isinstance(event := self.events.get(timeout=5), kind):
            pass
        return event


@pytest.fixture(params=KINDS)
def busy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Busy]:
    made = Busy(request.param, tmp_path)
    yield made
    made.go_on()
    made.run.close()


def test_a_start_that_is_still_queued_is_not_begun_after_a_kill(busy: Busy) -> None:
    started = busy.run.start(busy.plan, 1)
    busy.run.kill()
    busy.go_on()
    assert busy.wait(Ended).outcome == Outcome.KILLED
    assert started.cancelled()
    assert busy.processes.spawned == []


def test_who_is_being_taken_back_is_killed_too(busy: Busy) -> None:
    """Cancelled between its controller's restart and its return: nothing of it may live on unknown."""
    busy.take_back()
    busy.run.kill()
    busy.go_on()
    assert busy.wait(Ended).outcome == Outcome.KILLED
    assert not busy.processes.alive


def test_a_notice_that_came_too_late_does_not_stop_the_next_start(tmp_path: Path) -> None:
    """It had ended by itself when it was asked to stop; then it begins anew."""
    busy = Busy("command", tmp_path)
    refused = busy.run.preempt(1.0)
    busy.go_on()
    assert refused.exception(5) is not None
    busy.run.start(busy.plan, 1)
    assert busy.wait(Started).generation == 1
    busy.run.close()


def test_a_deadline_that_came_too_late_does_not_end_the_next_start(tmp_path: Path) -> None:
    busy = Busy("training", tmp_path)
    refused = busy.run.preempt(0.3)
    busy.go_on()
    assert refused.exception(5) is not None
    busy.run.start(busy.plan, 1)
    assert busy.wait(Ended).outcome == Outcome.LOST, "its ranks say nothing within `launch_s`; no deadline came first"
    busy.run.close()
