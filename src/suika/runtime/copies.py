"""Copies of a job's state in its nodes' memory, seen from the coordinator. No torch.

Each node of the job has a holder. Every so many steps the ranks are asked for a copy, which they take after one agreed
step; it counts as a set once every share is held, and what lives on one node only is held by the next node too. One set
at a time is under way, and the one before it stays until it counts: two at most stand in memory. Holders are no members
of the gang: their deaths cost no step of training, and after a loss they stay until the job has started again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from suika.core.cluster import Device
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.reshard.state import JobShape
from suika.runtime.events import Copied, JobEvent
from suika.runtime.gang import HOLDER_ENTRY, Gang, Member
from suika.runtime.messages import Message, Processes
from suika.runtime.pieces import is_whole

_UNDER_WAY_S = 60.0  # a set that is not complete by then is given up
_ANSWER_S = 2.0
_MOST_FAILURES = 3  # of a node's holders, one after the other: then the job goes without
_MARK = "memory:"
_ADDRESS = ("host", "port", "line", "token")

Key = tuple[int, int]  # generation, step


@dataclass
class _Holder:
    process: str
    node: str
    pid: int | None = None
    address: Mapping[str, Any] | None = None  # known once it has said so
    asked: bool = False  # it has not answered yet
    num_bytes: int = 0  # that it held when it last said so


@dataclass
class CopySet:
    """The copies of one step: which holder (its process) has each rank's share, and who has the copies of those."""

    generation: int
    step: int
    own: dict[int, str] = field(default_factory=dict)
    copied: dict[int, str] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)  # ranks whose shares lie on no other node in part
    meta: Mapping[str, Any] = field(default_factory=dict)
    stall_s: float = 0.0
    num_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{_MARK}{self.generation}/{self.step}"

    @property
    def plan(self) -> Plan | None:
        return Plan.from_dict(self.meta["plan"]) if self.meta else None

    @property
    def complete(self) -> bool:
        plan = self.plan
        return plan is not None and len(self.own) == plan.layout.num_ranks and self.alone <= set(self.copied)


def is_name(snapshot: str | None) -> bool:
    """Whether it names copies in memory, not a folder."""
    return snapshot is not None and snapshot.startswith(_MARK)


class Copies:
    """All of it happens on the job's thread."""

    def __init__(
        self, job_id: str, spec: JobSpec, processes: Processes, gang: Gang, emit: Callable[[JobEvent], None]
    ) -> None:
        self.error: str | None = None  # why the last copy failed
        self.newest: Key | None = None  # the newest complete set
        self._job_id, self._every = job_id, spec.memory_copy_every_steps
        self._shape = JobShape.of(spec)
        self._processes, self._gang, self._emit = processes, gang, emit
        self._holders: dict[str, _Holder] = {}  # alive, by process
        self._failures: dict[str, int] = {}
        self._sets: dict[Key, CopySet] = {}
        self._asked: tuple[int, float] | None = None  # the generation that was asked for a copy, and when
        self._due = 0  # the step from which on the next one is asked for

    # -- while the job trains -----------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """The job has started with so many steps done: the first copy is due as soon as there are holders."""
        self._asked, self._due = None, step

    def stepped(self, step: int, generation: int, plan: Plan, ranks: Mapping[Device, Member]) -> None:
        """Ask for a copy when it is time; keep a holder on each node of the plan."""
        if not self._every:
            return
        if self._asked is not None:
            asked_in, asked_s = self._asked
            if asked_in != generation or time.monotonic() - asked_s > _UNDER_WAY_S:
                self._give_up("it was not complete in time" if asked_in == generation else "the job moved")
        nodes = list(dict.fromkeys(device.node for device in plan.devices))
        self._keep_holders(nodes)
        if self._asked is not None or step < self._due:
            return
        holders = {holder.node: holder.address for holder in self._holders.values() if holder.address is not None}
        if all(node in holders for node in nodes):
            self._asked, self._due = (generation, time.monotonic()), step + self._every
            order = {"generation": generation, "holders": {node: holders[node] for node in nodes}}
            self._gang.tell(ranks.values(), "copy", **order)

    def _keep_holders(self, nodes: list[str]) -> None:
        """One on each node. Those elsewhere stay for the sets that they hold."""
        needed = {process for one in self._sets.values() for process in (*one.own.values(), *one.copied.values())}
        for holder in list(self._holders.values()):
            if holder.node not in nodes and holder.process not in needed and self._asked is None:
                self._processes.kill(holder.process)
                del self._holders[holder.process]
        there = {holder.node for holder in self._holders.values()}
        for node in nodes:
            if node not in there and self._failures.get(node, 0) < _MOST_FAILURES:
                name = f"{self._job_id}.holder.{node}.{secrets.token_hex(4)}"
                self._holders[name] = _Holder(name, node)
                self._processes.spawn(name, node, HOLDER_ENTRY, {}, self._gang.post)

    # -- what is heard ------------------------------------------------------------------------------------------------

    def hear(self, event: Message) -> None:
        """An event of a process that is no member of the gang."""
        holder = self._holders.get(event.get("process", ""))
        if holder is None:
            return
        if event["event"] == "forked":
            holder.pid = event["pid"]
        elif event["event"] == "exit":
            del self._holders[holder.process]
            self._failures[holder.node] = self._failures.get(holder.node, 0) + 1
            if self._asked is not None:
                self._give_up(f"the holder on {holder.node} ended with code {event['code']}")
        elif event["event"] == "message":
            self._take_in(holder, event["message"])

    def complain(self, message: Message) -> None:
        """A rank or a holder could not do its part."""
        if self._asked is not None and message["generation"] == self._asked[0]:
            self._give_up(message["error"])

    def _take_in(self, holder: _Holder, message: Message) -> None:
        match message["say"]:
            case "holding":
                holder.address, holder.asked = {name: message[name] for name in _ADDRESS}, False
                holder.num_bytes = message["num_bytes"]
            case "held":
                self._held(holder, message)
            case "unheld":
                self.complain(message)

    def _held(self, holder: _Holder, message: Message) -> None:
        key = (message["generation"], message["step"])
        if self.newest is not None and key < self.newest:
            return
        one = self._sets.setdefault(key, CopySet(*key))
        holders = one.copied if message["copied"] else one.own
        if message["rank"] not in holders:
            one.num_bytes += message["num_bytes"]
        holders[message["rank"]] = holder.process
        if not message["copied"]:
            one.stall_s = max(one.stall_s, message["stall_s"])
            if message["alone"]:
                one.alone.add(message["rank"])
            if message["rank"] == 0:
                one.meta = message["meta"]
        if one.complete and key != self.newest:
            self._complete(key, one)

    def _complete(self, key: Key, one: CopySet) -> None:
        self.newest, self.error, self._asked = key, None, None
        self._failures.clear()
        self._sets = {k: s for k, s in self._sets.items() if k >= key}
        self._tell("drop", before=key, sets=[])
        self._emit(Copied(self._job_id, one.generation, one.step, one.num_bytes, one.stall_s))

    def _give_up(self, why: str) -> None:
        """Drop what there is of sets that are not complete; the next one is asked for in its time."""
        self.error, self._asked = why, None
        unfinished = [key for key, one in self._sets.items() if not one.complete]
        for key in unfinished:
            del self._sets[key]
        self._tell("drop", before=self.newest or (0, 0), sets=unfinished)

    # -- after a loss -------------------------------------------------------------------------------------------------

    def best(self) -> CopySet | None:
        """The newest set that can be had whole from holders which answer now."""
        self._ask_all()
        for _, one in sorted(self._sets.items(), reverse=True):
            plan = one.plan
            if plan is not None and is_whole(self._shape, plan, *(self._at_hand(h) for h in (one.own, one.copied))):
                return one
        return None

    def recall_order(self, one: CopySet) -> dict[str, Any]:
        """What ranks need in order to fill themselves from `one`."""
        plan = one.plan
        assert plan is not None
        where = {"own": self._at_hand(one.own), "copied": self._at_hand(one.copied)}
        about = {"generation": one.generation, "step": one.step, **one.meta}
        return about | {kind: {str(rank): holder for rank, holder in held.items()} for kind, held in where.items()}

    def _at_hand(self, held: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """Of ranks' shares, those whose holder is there: rank -> its node and address."""
        found = {}
        for rank, process in held.items():
            holder = self._holders.get(process)
            if holder is not None and holder.address is not None and not holder.asked:
                found[rank] = {"node": holder.node, **holder.address}
        return found

    def _ask_all(self) -> None:
        """Who does not answer at once is not counted on."""
        for holder in self._holders.values():
            holder.asked = True
        self._tell("report")
        deadline = time.monotonic() + _ANSWER_S
        while any(holder.asked for holder in self._holders.values()) and time.monotonic() < deadline:
            self._gang.pump(deadline)

    def pids(self, node: str) -> list[int]:
        """Of the holders on `node`."""
        return [h.pid for h in list(self._holders.values()) if h.node == node and h.pid is not None]

    def take_back(self, process: str, node: str) -> None:
        """A holder that has outlived its coordinator: it says what it has."""
        self._holders[process] = _Holder(process, node)

    def welcome(self) -> None:
        """Once all of them have been claimed."""
        self._tell("report")

    def end(self) -> None:
        """Nobody will need the copies any more."""
        for process in self._holders:
            self._processes.kill(process)
        deadline = time.monotonic() + _ANSWER_S
        while self._holders and time.monotonic() < deadline:
            self._gang.pump(deadline)
        self._holders, self._sets, self._asked, self.newest, self._due = {}, {}, None, None, 0

    def _tell(self, do: str, **content: Any) -> None:
        for process in self._holders:
            self._processes.send(process, {"do": do, "job_id": self._job_id, **content})
