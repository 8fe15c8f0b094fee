"""Sets of copies: what holders have said that they have, and which of it counts. Plain data; no torch.

A set is the state after one step of one generation. It counts once every rank's share is held, and with it the copies
of those that lie on one node only. Sets of a past that the job has given up, because it was started again from less,
are none of its state any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from suika.core.plan import Plan
from suika.runtime.messages import Message

_MARK = "memory:"

Key = tuple[int, int]  # generation, step


@dataclass
class CopySet:
    """The copies of one step: which holder (its process) has each rank's share, and who has the copies of those."""

    generation: int
    step: int
    own: dict[int, str] = field(default_factory=dict)
    copied: dict[int, str] = field(default_factory=dict)
    alone: set[int] = field(default_factory=set)  # ranks whose shares lie on no other node in part
    meta: Mapping[str, Any] = field(default_factory=dict)  # plan and records; each node has them
    stall_s: float = 0.0
    num_bytes: int = 0

    @property
    def name(self) -> str:
        return name_of(self.key)

    @property
    def key(self) -> Key:
        return self.generation, self.step

    @property
    def plan(self) -> Plan | None:
        return Plan.from_dict(self.meta["plan"]) if self.meta else None

    @property
    def holders(self) -> set[str]:
        return {*self.own.values(), *self.copied.values()}

    @property
    def complete(self) -> bool:
        plan = self.plan
        return plan is not None and len(self.own) == plan.layout.num_ranks and self.alone <= set(self.copied)

    def take_in(self, holder: str, message: Message) -> None:
        """`holder` says that it has a rank's share, or the copy of one."""
        holders = self.copied if message["copied"] else self.own
        if message["rank"] not in holders:
            self.num_bytes += message["num_bytes"]
        holders[message["rank"]] = holder
        self.meta = message["meta"] or self.meta
        if not message["copied"]:
            self.stall_s = max(self.stall_s, message["stall_s"])
            if message["alone"]:
                self.alone.add(message["rank"])


def is_name(snapshot: str | None) -> bool:
    """Whether it names copies in memory, not a folder."""
    return snapshot is not None and snapshot.startswith(_MARK)


def name_of(key: Key) -> str:
    return f"{_MARK}{key[0]}/{key[1]}"


def key_of(name: str) -> Key:
    """The set that `name_of` has named so."""
    generation, step = name.removeprefix(_MARK).split("/")
    return int(generation), int(step)


@dataclass(frozen=True)
class Lineage:
    """Which sets are of the job's present history: those of generations from `since` on, and the one that it was last
    started from. While it waits to start again: of these the one of the `step` that was promised, or a later one that
    became whole after that was said."""

    since: int = 0
    source: Key | None = None
    step: int | None = None

    def has(self, key: Key) -> bool:
        return (key == self.source or key[0] >= self.since) and key[1] >= (self.step or 0)


class CopySets:
    """All sets of a job that are not given up."""

    def __init__(self, lineage: Lineage | None = None) -> None:
        self.newest: Key | None = None  # that counts
        self.lineage = lineage or Lineage()
        self._sets: dict[Key, CopySet] = {}
        self._given_up: set[Key] = set()  # what holders said of them before they dropped them may still come

    def __iter__(self) -> Iterator[CopySet]:
        """Newest first."""
        return iter(sorted(self._sets.values(), key=lambda one: one.key, reverse=True))

    @property
    def holders(self) -> set[str]:
        """Those that have something of any of them."""
        return {process for one in self._sets.values() for process in one.holders}

    def take_in(self, holder: str, message: Message) -> CopySet | None:
        """The set that counts from now on, by this word of `holder`; those before it are dropped."""
        key = (message["generation"], message["step"])
        if self.is_over(key):
            return None
        one = self._sets.setdefault(key, CopySet(*key))
        one.take_in(holder, message)
        if not one.complete or key == self.newest:
            return None
        self.newest = key
        self._sets = {k: s for k, s in self._sets.items() if k >= key}
        self._given_up = {k for k in self._given_up if k > key}
        return one

    def is_over(self, key: Key) -> bool:
        """Whether nothing will come of it any more: it was given up, a newer one counts, or it is of another past."""
        late = key in self._given_up or (self.newest is not None and key < self.newest)
        return late or not self.lineage.has(key)

    def drop_unfinished(self) -> list[Key]:
        """Give up what does not count, but what the job was started from."""
        unfinished = [key for key, one in self._sets.items() if not one.complete and key != self.lineage.source]
        for key in unfinished:
            del self._sets[key]
        self._given_up.update(unfinished)
        return unfinished

    def keep_to(self, lineage: Lineage) -> list[Key]:
        """From now on only its sets are the job's; the others', dropped."""
        self.lineage = lineage
        strange = [key for key in self._sets if not lineage.has(key)]
        for key in strange:
            del self._sets[key]
        if self.newest not in self._sets:
            self.newest = None
        return strange

    def rests_on(self, holder: str) -> bool:
        """Whether the newest set that counts has something at `holder`."""
        return self.newest is not None and holder in self._sets[self.newest].holders
