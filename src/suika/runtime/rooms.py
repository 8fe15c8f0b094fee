"""What copies in memory take of each node, over all jobs of a controller, and who may keep what. No torch.

A node is promised no more than its operator lets copies have, and no more than it says is available. A job is promised
room for two sets, since the old one stays until the new one counts. What holders say that they hold counts even if it
was never promised: after a restart of the controller, or while a holder waits to be ended.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from suika.core.host_memory import host_memory
from suika.core.words import size

FRACTION = 0.5  # of a node's memory, for all copies on it together, unless its operator says otherwise
_SETS = 2


@dataclass(frozen=True)
class NodeMemory:
    """As the node said last. `limit_bytes`: what copies may take there at most."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int

    @staticmethod
    def here(fraction: float = FRACTION) -> NodeMemory:
        """This host's; copies may have `fraction` of it."""
        found = host_memory()
        return NodeMemory(found.total_bytes, found.available_bytes, int(fraction * found.total_bytes))


@dataclass(frozen=True)
class Wish:
    """One set of a job's copies. `own`: what each node of the job gives to its own holder, in bytes; `alone`: what of
    that lies on no other node, and needs a second place."""

    own: Mapping[str, int]
    alone: Mapping[str, int]


@dataclass(frozen=True)
class Places:
    """`keepers`: node of the job -> where what lies on it alone is kept a second time. `lacking`: why that is nowhere
    for some. `refused`: why there is no copy at all."""

    keepers: Mapping[str, str] = field(default_factory=dict)
    lacking: str | None = None
    refused: str | None = None


class Rooms:
    """Safe from any thread. `memory`: of the nodes that are up; None: the node does not say."""

    def __init__(self, memory: Callable[[], Mapping[str, NodeMemory | None]]) -> None:
        self.avoided: Callable[[], Collection[str]] = tuple  # nodes that are being emptied
        self._memory = memory
        self._lock = threading.Lock()
        self._promised: dict[str, dict[str, int]] = {}  # node -> job -> bytes
        self._held: dict[str, dict[str, int]] = {}

    def settle(self, job_id: str, wish: Wish, before: Mapping[str, str], bad: Collection[str] = ()) -> Places:
        """Choose who keeps what, and promise the job room for it in the place of what it was promised before. Who is
        refused is promised nothing, and has what its holders hold. What has a keeper in `before` stays there if it can.
        `bad`: nodes whose holders fail."""
        memory, avoided = self._memory(), set(self.avoided())
        with self._lock:
            free = {node: self._free(node, said, job_id) for node, said in memory.items() if node not in bad}
            strangers = [n for n in free if memory[n] is not None and n not in avoided and n not in wish.own]
            places, needs = _choose(wish, free, sorted(strangers, key=lambda node: (-free[node], node)), before)
            self._forget(self._promised, job_id)
            for node, num_bytes in needs.items():
                self._promised.setdefault(node, {})[job_id] = num_bytes
        return places

    def hold(self, job_id: str, held: Mapping[str, int]) -> None:
        """What the job's holders hold now, by node."""
        with self._lock:
            self._forget(self._held, job_id)
            for node, num_bytes in held.items():
                self._held.setdefault(node, {})[job_id] = num_bytes

    def release(self, job_id: str) -> None:
        """The job has no holders any more."""
        with self._lock:
            self._forget(self._promised, job_id)
            self._forget(self._held, job_id)

    def held_bytes(self) -> dict[str, int]:
        """By node, what all holders hold; nodes without any are left out."""
        with self._lock:
            return {node: sum(jobs.values()) for node, jobs in self._held.items() if jobs}

    def limits(self) -> dict[str, int | None]:
        """By node that is up, what copies may take there at most; None: the node does not say."""
        return {node: said.limit_bytes if said is not None else None for node, said in self._memory().items()}

    def _free(self, node: str, said: NodeMemory | None, job_id: str) -> float:
        """What this job may have there in all. What is promised and not taken yet is not available any more."""
        if said is None:
            return math.inf
        promised, held = self._promised.get(node, {}), self._held.get(node, {})
        others = {job: max(promised.get(job, 0), held.get(job, 0)) for job in {*promised, *held} - {job_id}}
        to_come = sum(num_bytes - held.get(job, 0) for job, num_bytes in others.items())
        available = said.available_bytes - to_come + held.get(job_id, 0)
        return max(min(said.limit_bytes - sum(others.values()), available), 0)

    @staticmethod
    def _forget(book: dict[str, dict[str, int]], job_id: str) -> None:
        for jobs in book.values():
            jobs.pop(job_id, None)


def _choose(
    wish: Wish, free: Mapping[str, float], strangers: Sequence[str], before: Mapping[str, str]
) -> tuple[Places, dict[str, int]]:
    """The places, and what they need of each node. `strangers`, nodes outside of the job, are asked only if none of its
    own can do it."""
    needs = {node: _SETS * num_bytes for node, num_bytes in wish.own.items()}
    for node, num_bytes in needs.items():
        if num_bytes > free.get(node, 0):
            return Places(refused=f"no copy is made: {_no_room(node, num_bytes, free)}"), {}
    nodes, keepers, lacking = list(wish.own), {}, None
    for place, node in enumerate(nodes):
        num_bytes = _SETS * wish.alone[node]
        if not num_bytes:
            continue
        old = [other for other in strangers if other == before.get(node)]
        others = list(dict.fromkeys((*nodes[place + 1 :], *nodes[:place], *old, *strangers)))
        fits = [other for other in others if needs.get(other, 0) + num_bytes <= free.get(other, 0)]
        if fits:
            keepers[node] = fits[0]
            needs[fits[0]] = needs.get(fits[0], 0) + num_bytes
        elif others:
            why = "; ".join(_no_room(other, needs.get(other, 0) + num_bytes, free) for other in others)
            lacking = f"what lies on {node} alone has no second copy: {why}"
        else:
            lacking = f"all copies lie on {node}: there is no other node that is up and may keep them"
    return Places(keepers, lacking), needs


def _no_room(node: str, num_bytes: int, free: Mapping[str, float]) -> str:
    if node not in free:
        return f"{node} is not up, or its holders fail"
    return f"{node} has room for {size(free[node])} of this job's copies, which need {size(num_bytes)}"
