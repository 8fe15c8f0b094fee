"""A job's holders seen from the coordinator: spawned where they are needed, doubted, replaced, let go. No torch.

They are no members of the gang. One that was let go is not heard any more.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from suika.runtime.gang import HOLDER_ENTRY, Gang
from suika.runtime.messages import Message, Processes

ANSWER_S = 5.0  # they have the lowest claim on their nodes' processors
_HANGS_S = 10.0  # who has not answered for so long, after something went wrong, is replaced
_MOST_FAILURES = 3  # of a node's holders, one after the other: then it is asked no more
_FIRST_BITS = 48  # of a coordinator's first request: what answers another one's is not mistaken for an answer
_ADDRESS = ("host", "port", "line", "token")


@dataclass
class Seen:
    """One holder."""

    process: str
    node: str
    pid: int | None = None
    address: Mapping[str, Any] | None = None  # known once it has said so
    asked: int | None = None  # the first request that it has not answered
    asked_s: float = 0.0  # when that was
    unsure: bool = False  # its last answer did not say to which request: it may be one to another coordinator
    num_bytes: int = 0  # that it held when it last said so


class Holders:
    """Used on the job's thread."""

    def __init__(self, job_id: str, processes: Processes, gang: Gang) -> None:
        self.alive: dict[str, Seen] = {}  # by process
        self._job_id, self._processes, self._gang = job_id, processes, gang
        self._failures: dict[str, int] = {}
        self._last_request = secrets.randbits(_FIRST_BITS)

    # -- where they are -----------------------------------------------------------------------------------------------

    def keep(self, nodes: Collection[str], needed: Collection[str]) -> None:
        """Have one on each of `nodes`. Others stay if they are `needed` (processes) for what they hold."""
        self.spare(nodes, needed)
        there = {holder.node for holder in self.alive.values()}
        for node in nodes:
            if node not in there:
                name = f"{self._job_id}.holder.{node}.{secrets.token_hex(4)}"
                self.alive[name] = Seen(name, node)
                self._processes.spawn(name, node, HOLDER_ENTRY, {}, self._gang.post)

    def spare(self, nodes: Collection[str], needed: Collection[str]) -> None:
        """Let go of all others."""
        there = set[str]()
        for holder in list(self.alive.values()):
            if holder.process not in needed and (holder.node not in nodes or holder.node in there):
                self._let_go(holder)
            there.add(holder.node)

    def adopt(self, found: Mapping[str, str]) -> None:
        """Processes (-> node) that run already, and will be claimed for this job."""
        self.alive |= {process: Seen(process, node) for process, node in found.items()}

    def _let_go(self, holder: Seen) -> None:
        self._processes.kill(holder.process)
        del self.alive[holder.process]
        self._count()

    def end(self) -> None:
        """Kill them all; returns when they are gone, or after a moment."""
        for process in self.alive:
            self._processes.kill(process)
        deadline = time.monotonic() + ANSWER_S
        while self.alive and time.monotonic() < deadline:
            self._gang.pump(deadline)
        self.alive.clear()

    @property
    def addresses(self) -> dict[str, Mapping[str, Any] | None]:
        """By node; of several there the first one's. None: it has not said so yet, or does not answer now."""
        here = reversed(self.alive.values())
        return {holder.node: holder.address if holder.asked is None else None for holder in here}

    @property
    def failing(self) -> set[str]:
        """Nodes whose holders come to nothing."""
        return {node for node, times in self._failures.items() if times >= _MOST_FAILURES}

    def forgive(self) -> None:
        self._failures.clear()

    # -- what they say ------------------------------------------------------------------------------------------------

    def take_in(self, holder: Seen, event: Message) -> None:
        """What concerns the process itself, whatever it holds."""
        message = event.get("message", {})
        match event["event"], message.get("say"):
            case "forked", _:
                holder.pid = event["pid"]
            case "exit", _:
                del self.alive[holder.process]
                self._failures[holder.node] = self._failures.get(holder.node, 0) + 1
                self._count()
            case "message", "holding":
                holder.address, holder.num_bytes = {name: message[name] for name in _ADDRESS}, message["num_bytes"]
                self._answered(holder, message.get("request"))
                self._count()
            case "message", "no-start":  # its node refuses it, and would again
                self._failures[holder.node] = _MOST_FAILURES
                self._let_go(holder)

    def _answered(self, holder: Seen, request: int | None) -> None:
        """Its newest word is said again to a new coordinator, which has asked it other questions."""
        if holder.asked is not None and (request is None or holder.asked <= request <= self._last_request):
            holder.asked, holder.unsure = None, request is None  # older ones do not say which they answer

    def tell(self, do: str, **content: Any) -> None:
        for process in self.alive:
            self.order(process, do, **content)

    def order(self, process: str, do: str, **content: Any) -> None:
        self._processes.send(process, {"do": do, "job_id": self._job_id, **content})

    def doubt(self) -> None:
        """Have all of them say what they have."""
        self._last_request = request = self._last_request + 1
        for holder in self.alive.values():
            if holder.asked is None:
                holder.asked, holder.asked_s = request, time.monotonic()
        self.tell("report", request=request)

    def listen(self) -> None:
        """Until all who were asked have answered; who does not soon is not counted on."""
        deadline = time.monotonic() + ANSWER_S
        while not self.all_answered and time.monotonic() < deadline:
            self._gang.pump(deadline)

    @property
    def all_answered(self) -> bool:
        return all(holder.asked is None for holder in self.alive.values())

    @property
    def all_surely_answered(self) -> bool:
        """Whether what they said is what they have now."""
        return self.all_answered and not any(holder.unsure for holder in self.alive.values())

    def end_hanging(self) -> None:
        for holder in self.alive.values():
            if holder.asked is not None and time.monotonic() - holder.asked_s > _HANGS_S:
                self._processes.kill(holder.process)  # its exit is heard as any other's

    def at_hand(self, held: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """Of ranks' shares (-> process), those whose holder is there: rank -> its node and address."""
        found = {}
        for rank, process in held.items():
            holder = self.alive.get(process)
            if holder is not None and holder.address is not None and holder.asked is None:
                found[rank] = {"node": holder.node, **holder.address}
        return found

    def _count(self) -> None:
        """Let the book of all jobs know what is held where."""
        held: dict[str, int] = {}
        for holder in self.alive.values():
            held[holder.node] = held.get(holder.node, 0) + holder.num_bytes
        self._processes.rooms.hold(self._job_id, held)
