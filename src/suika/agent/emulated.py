"""Emulated devices: the processes of a node's jobs, acted out in this process, in scaled time. No torch.

What the controller and its coordinators see is what real ranks would say, message for message: an emulated rank
comes up, trains, saves, moves, ends and can be killed. Only its seconds are shorter: those of steps, launches, moves
and saves are divided by `speedup`. Leases, signs of life and the protocol's own time are not.

    Emulation     one thread, a heap of what is due: all nodes of this process
    EmulatedForks one node's end of it, in the place of a fork server
    EmulatedJob   (emulated_job.py) the ranks of one job
"""

from __future__ import annotations

import heapq
import itertools
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from suika.agent.emulated_job import EmulatedJob, Prices
from suika.agent.rules import Rules
from suika.core.cluster import Device
from suika.core.errors import require
from suika.runtime import setup
from suika.runtime.gang import COMMAND_ENTRY, RANK_ENTRY, STORE_ENTRY
from suika.runtime.messages import Message

MOST_SPEEDUP = 60.0  # beyond it the protocol's own time would weigh too much
_CANNOT_RUN = 126
_KILLED = -9
Action = Callable[[], None]


@dataclass(frozen=True)
class EmulatedRules(Rules):
    """What a node whose jobs are acted out refuses: a command, which has nothing to act by."""

    def refusal(self, order: Message) -> str | None:
        runs_it = order["entry"] == COMMAND_ENTRY and not setup.is_of(order["process"])
        return "acts jobs out, and commands have nothing to act by" if runs_it else None


@dataclass
class EmulatedProcess:
    """A rank, or a rendezvous store (`device` is None). `said`: its newest message of each (kind, generation)."""

    name: str
    node: str
    job_id: str
    device: Device | None
    pid: int
    said: dict[tuple[str, int], Message] = field(default_factory=dict)


class Emulation:
    """`post` may be called from any thread; everything else happens on this object's own, or in `advance`."""

    def __init__(self, prices: Prices, speedup: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives real seconds. Raises `SpecError` for a speedup that is not in 1..60."""
        require(1.0 <= speedup <= MOST_SPEEDUP, "speedup", speedup, f"must be between 1 and {MOST_SPEEDUP:.0f}")
        self.prices, self.speedup, self.clock = prices, speedup, clock
        self.processes: dict[str, EmulatedProcess] = {}
        self.jobs: dict[str, EmulatedJob] = {}
        self._nodes: dict[str, EmulatedForks] = {}
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers, self._pids = itertools.count(), itertools.count(1)
        self._news = threading.Condition()
        self._stopped = False

    def node(self, name: str) -> EmulatedForks:
        """The end that the agent of node `name` uses."""
        return self._nodes.setdefault(name, EmulatedForks(self, name))

    # -- time -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        threading.Thread(target=self._run, name="emulation", daemon=True).start()

    def stop(self) -> None:
        with self._news:
            self._stopped = True
            self._news.notify()

    def post(self, action: Action) -> None:
        """Have `action` carried out as soon as can be, in the order of the calls."""
        self.at(0.0, action)

    def at(self, due_s: float, action: Action) -> None:
        """Have `action` carried out at `due_s` of the clock."""
        with self._news:
            heapq.heappush(self._heap, (due_s, next(self._numbers), action))
            self._news.notify()

    def real_s(self, emulated_s: float) -> float:
        return emulated_s / self.speedup

    def advance(self) -> float | None:
        """Carry out what is due. Returns the clock's time of what comes next; None: nothing does."""
        while True:
            with self._news:
                if not self._heap or self._heap[0][0] > self.clock():
                    return self._heap[0][0] if self._heap else None
                action = heapq.heappop(self._heap)[2]
            try:
                action()
            except Exception:  # of one job: all others are acted out by this thread too
                traceback.print_exc(file=sys.stderr)

    def _run(self) -> None:
        while not self._stopped:
            self.advance()
            with self._news:
                next_s = self._heap[0][0] if self._heap else None
                wait_s = None if next_s is None else max(next_s - self.clock(), 0.0)
                if not self._stopped and wait_s != 0.0:
                    self._news.wait(wait_s)

    # -- processes --------------------------------------------------------------------------------------------------

    def carry_out(self, node: str, order: Message) -> None:
        """An order of the node's agent, on this object's thread."""
        match order["do"]:
            case "replay":
                self._replay(node, order["number"])
            case "fork" if order["process"] not in self.processes:
                self._fork(node, order)
            case "send" if process := self.processes.get(order["process"]):
                self._deliver(process, order["message"])
            case "kill" if process := self.processes.get(order["process"]):
                self.end(process, _KILLED)
            case "shutdown":
                for process in [p for p in self.processes.values() if p.node == node]:
                    self.end(process, _KILLED)

    def _fork(self, node: str, order: Message) -> None:
        name, launch = order["process"], order["launch"]
        entry = launch.get("entry", order["entry"])  # in an environment of its own a rank is a rank
        if entry not in (RANK_ENTRY, STORE_ENTRY) and not setup.is_of(name):  # a command has no emulated counterpart
            self._nodes[node].tell({"event": "exit", "process": name, "code": _CANNOT_RUN})
            return
        device = Device.parse(launch["device"]) if entry == RANK_ENTRY else None
        process = EmulatedProcess(name, node, name.partition(".")[0], device, next(self._pids))
        self.processes[name] = process
        self._nodes[node].tell({"event": "forked", "process": name, "pid": process.pid})
        if entry == STORE_ENTRY:
            self.say(process, "store", host="emulated", port=0)
        if device is None:
            return
        if process.job_id not in self.jobs:
            self.jobs[process.job_id] = EmulatedJob(self, process.job_id, launch)
        self.jobs[process.job_id].join(process)

    def _deliver(self, process: EmulatedProcess, message: Message) -> None:
        if message["do"] == "ping":
            self.say(process, "pong")
        elif message["do"] == "exit":
            self._let_go(process)
        elif message["do"] == "setup":  # there is nothing to set up
            self.say(process, "set-up", int(process.name.split(".")[2]))
        elif process.device is not None:
            self.jobs[process.job_id].hear(process, message)

    def _let_go(self, process: EmulatedProcess) -> None:
        due_s = self.jobs[process.job_id].may_go_at(process) if process.device is not None else 0.0

        def go() -> None:
            if process.name in self.processes:
                self.end(process, 0)

        self.at(due_s, go)

    def end(self, process: EmulatedProcess, code: int) -> None:
        """The process is gone from now on."""
        del self.processes[process.name]
        if process.device is not None:
            job = self.jobs[process.job_id]
            job.leave(process)
            if not job.ranks:
                del self.jobs[process.job_id]
        self._nodes[process.node].tell({"event": "exit", "process": process.name, "code": code})

    def say(self, process: EmulatedProcess, say: str, generation: int = 0, **content: object) -> None:
        """What the process says to its coordinator."""
        message = {"say": say, "job_id": process.job_id, "generation": generation, **content}
        process.said.pop((say, generation), None)  # the order is that of the newest
        process.said[say, generation] = message
        for key in [key for key in process.said if 0 < key[1] < generation - 1]:
            del process.said[key]
        self._nodes[process.node].tell({"event": "message", "process": process.name, "message": message})

    def _replay(self, node: str, asked: int) -> None:
        """Who is here, then what they said last: to an agent that does not know what an earlier one was told."""
        here = [process for process in self.processes.values() if process.node == node]
        found = [{"process": process.name, "pid": process.pid} for process in here]
        self._nodes[node].tell({"event": "hello", "processes": found, "asked": asked})
        for process in here:
            for message in process.said.values():
                self._nodes[node].tell({"event": "message", "process": process.name, "message": message})


class EmulatedForks:
    """A `Forks` (agent/forks.py) whose processes are emulated. They live as long as this process."""

    def __init__(self, emulation: Emulation, node: str) -> None:
        self._emulation, self._node = emulation, node
        self._on_event: Callable[[Message], None] | None = None

    def start(self, on_event: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        self._on_event = on_event

    def order(self, order: Message) -> None:
        self._emulation.post(lambda: self._emulation.carry_out(self._node, order))

    def close(self) -> None:
        self._on_event = None

    def tell(self, event: Message) -> None:
        if (on_event := self._on_event) is not None:  # its agent may let go of it right now
            on_event(event)
