"""Copies of a job's state in nodes' memory, seen from the coordinator. No torch.

Each node of the job has a holder, and so has a node outside of it that keeps what would lie on one node only. Every so
many steps the ranks are asked for a copy, which they take after one agreed step; it counts as a set once every share is
held, and what lives on one node only is held by another one too. One set at a time is under way, and the one before it
stays until it counts: two at most stand in memory, and no copy is asked for where there is no room for them. Holders
are no members of the gang: their deaths cost no step of training, and after a loss they stay until the job has started
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from suika.core.cluster import Device
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.reshard.state import JobShape
from suika.runtime.copysets import CopySet, CopySets, Key, Lineage
from suika.runtime.events import Copied, JobEvent, Uncopied
from suika.runtime.gang import Gang, Member
from suika.runtime.holders import Holders, Seen
from suika.runtime.messages import Message, Processes
from suika.runtime.pieces import is_whole, own_bytes
from suika.runtime.rooms import Places, Wish

_UNDER_WAY_S = 60.0  # a set that is not complete by then is given up
_LOOK_S = 1.0  # between looks whether a keeper's node is being emptied


class Copies:
    """All of it happens on the job's thread."""

    def __init__(
        self, job_id: str, spec: JobSpec, processes: Processes, gang: Gang, emit: Callable[[JobEvent], None]
    ) -> None:
        self.error: str | None = None  # why the last copy was not made, or not on two nodes
        self.holders = Holders(job_id, processes, gang)
        self._job_id, self._every = job_id, spec.memory_copy_every_steps
        self._shape = JobShape.of(spec)
        self._processes, self._gang, self._emit = processes, gang, emit
        self._sets = CopySets()
        self._places = Places()
        self._nodes: list[str] = []  # on which there are holders therefore
        self._wish: tuple[int, Wish] = (0, Wish({}, {}))  # of a generation
        self._asked: tuple[int, float] | None = None  # the generation that was asked for a copy, and when
        self._due = 0  # the step from which on the next one is asked for
        self._look_s = 0.0
        self._told: str | None = None  # what kind of trouble the owner knows of

    @property
    def newest(self) -> Key | None:
        """The newest complete set."""
        return self._sets.newest

    # -- while the job trains -----------------------------------------------------------------------------------------

    def forsake(self, generation: int) -> None:
        """In `generation` the job starts from what is not in memory: all copies of before are of a past that it gives
        up, also those of nodes that are away now, and though this start may fail."""
        self._sets.keep_to(Lineage(generation))
        self.holders.tell("drop", before=(generation, 0), sets=[])

    def begin(self, generation: int, step: int, source: Key | None) -> None:
        """The job has started with so many steps done, from the set `source` or from none: others are of a past that
        it has given up. The first copy is due as soon as there are holders."""
        self._asked, self._due = None, step
        strange = self._sets.keep_to(Lineage(generation, source))
        self.holders.tell("drop", before=self.newest or (0, 0), sets=strange)

    def has_time(self, step: int, generation: int) -> bool:
        """Whether after that step there is nothing to do."""
        if not self._every:
            return True
        now = time.monotonic()
        if self._asked is not None:
            asked_in, asked_s = self._asked
            return asked_in == generation and now - asked_s <= _UNDER_WAY_S
        return step < self._due and (not self._places.keepers or now < self._look_s)

    def stepped(self, step: int, generation: int, plan: Plan, ranks: Mapping[Device, Member]) -> None:
        """Ask for a copy when it is time."""
        if not self._every:
            return
        if self._asked is not None:
            asked_in, asked_s = self._asked
            if asked_in != generation:
                self._drop_unfinished()  # the job has moved: that is no trouble
            elif time.monotonic() - asked_s > _UNDER_WAY_S:
                self._give_up("it was not complete in time")
        if self._asked is None and (step >= self._due or self._a_keeper_leaves(plan)):
            self._ask(step, generation, plan, ranks)

    def _ask(self, step: int, generation: int, plan: Plan, ranks: Mapping[Device, Member]) -> None:
        """Have holders where they are needed, and a copy once they all are there. Where there is no room for one, look
        again when the next one would be due."""
        self.holders.end_hanging()
        if not self.holders.all_answered:
            return  # which of them are needed for what they hold is not known yet
        if self._wish[0] != generation:
            total = own_bytes(self._shape, plan)
            own, alone = ({node: pair[i] for node, pair in total.items()} for i in (0, 1))
            self._wish = generation, Wish(own, alone)
        wish = self._wish[1]
        before = self._places.keepers or self._kept_outside(wish)
        places = self._processes.rooms.settle(self._job_id, wish, before, self.holders.failing)
        if places.refused is not None:
            self._due = step + self._every
            self._trouble("refused", places.refused, generation)
            return
        self._places = places
        self._nodes = list(dict.fromkeys((*wish.own, *places.keepers.values())))
        self.holders.keep(self._nodes, self._sets.holders)
        found = self.holders.addresses
        if all(found.get(node) is not None for node in self._nodes):
            self._asked, self._due = (generation, time.monotonic()), step + self._every
            order = {"holders": {node: found[node] for node in self._nodes}, "keepers": dict(places.keepers)}
            self._gang.tell(ranks.values(), "copy", generation=generation, **order)

    def _kept_outside(self, wish: Wish) -> dict[str, str]:
        """Where a node outside of the job has kept something for it, before the controller was restarted."""
        nodes = [holder.node for holder in self.holders.alive.values() if holder.node not in wish.own]
        return dict.fromkeys(wish.own, nodes[0]) if nodes else {}

    def _a_keeper_leaves(self, plan: Plan) -> bool:
        """Whether a node outside of the job that keeps something is being emptied."""
        if time.monotonic() < self._look_s:
            return False
        self._look_s = time.monotonic() + _LOOK_S
        outside = set(self._places.keepers.values()) - {device.node for device in plan.devices}
        return bool(outside) and not outside.isdisjoint(self._processes.rooms.avoided())

    # -- what is heard ------------------------------------------------------------------------------------------------

    def hear(self, event: Message) -> None:
        """An event of a process that is no member of the gang."""
        holder = self.holders.alive.get(event.get("process", ""))
        if holder is None:
            return
        self.holders.take_in(holder, event)
        if event["event"] == "exit":
            self._gone(holder, event["code"])
        elif event["event"] == "message":
            self._take_in(holder, event["message"])

    def _gone(self, holder: Seen, code: int) -> None:
        """What it held lies on one node now: the next copy is due at once."""
        if self._sets.rests_on(holder.process):
            self._due = 0
        if self._asked is not None:
            self._give_up(f"the holder on {holder.node} ended with code {code}")

    def complain(self, message: Message) -> None:
        """A rank or a holder could not do its part."""
        if self._asked is not None and message["generation"] == self._asked[0]:
            self._give_up(message["error"])

    def _take_in(self, holder: Seen, message: Message) -> None:
        if message["say"] == "unheld":
            self.complain(message)
        elif message["say"] == "held":
            key = message["generation"], message["step"]
            if self._sets.is_over(key):  # it was still on its way when others were told to drop it
                self.holders.order(holder.process, "drop", before=(0, 0), sets=[key])
            elif (one := self._sets.take_in(holder.process, message)) is not None:
                self._complete(one)

    def _complete(self, one: CopySet) -> None:
        self._asked = None
        self.holders.forgive()
        self.holders.tell("drop", before=one.key, sets=[])
        if self._nodes:
            self.holders.spare(self._nodes, self._sets.holders)
        lacking = self._places.lacking
        if self._places.keepers and not one.copied:
            lacking = "the nodes are of an older version, which keeps no second copy: upgrade their agents"
        nodes = {self.holders.alive[process].node for process in one.holders if process in self.holders.alive}
        about = (one.generation, one.step, one.num_bytes, one.stall_s)
        self._emit(Copied(self._job_id, *about, tuple(sorted(nodes)), lacking))
        self._trouble("lacking" if lacking else None, lacking, one.generation)

    def _give_up(self, why: str) -> None:
        """Drop what there is of sets that are not complete; the next one is asked for in its time."""
        assert self._asked is not None
        self._trouble("failed", f"a copy was given up: {why}", self._asked[0])
        self._drop_unfinished()
        self.holders.doubt()

    def _drop_unfinished(self) -> None:
        self._asked = None
        self.holders.tell("drop", before=self.newest or (0, 0), sets=self._sets.drop_unfinished())

    def _trouble(self, kind: str | None, why: str | None, generation: int) -> None:
        """Said once as long as it lasts."""
        self.error = why
        if why is not None and kind != self._told:
            self._emit(Uncopied(self._job_id, generation, why))
        self._told = kind

    # -- after a loss -------------------------------------------------------------------------------------------------

    def best(self) -> CopySet | None:
        """The newest set that can be had whole from holders which answer now. For a job without ranks."""
        self.holders.doubt()
        return self.best_known()

    def best_known(self) -> CopySet | None:
        """The same, of holders that have answered when they were asked last."""
        self._asked = None  # no rank is there to complete a set: from now on none is given up for another's death
        self.holders.listen()
        for one in self._sets:
            there = (self.holders.at_hand(held) for held in (one.own, one.copied))
            if (plan := one.plan) is not None and is_whole(self._shape, plan, *there):
                return one
        return None

    def recall_order(self, one: CopySet) -> dict[str, Any]:
        """What ranks need in order to fill themselves from `one`."""
        assert one.plan is not None
        where = {"own": self.holders.at_hand(one.own), "copied": self.holders.at_hand(one.copied)}
        about = {"generation": one.generation, "step": one.step, **one.meta}
        return about | {kind: {str(rank): holder for rank, holder in held.items()} for kind, held in where.items()}

    def pids(self, node: str) -> list[int]:
        """Of the holders on `node`."""
        return [h.pid for h in list(self.holders.alive.values()) if h.node == node and h.pid is not None]

    def take_back(self, found: Mapping[str, str], lineage: Lineage | None = None) -> None:
        """Holders (process -> node) that have outlived their coordinator: once they have been claimed they say what
        they have. `lineage`: which of it is the job's, if that is not known yet."""
        if lineage is not None:
            self._sets.keep_to(lineage)
        self.holders.adopt(found)

    def welcome(self) -> None:
        """Once all of them have been claimed."""
        self.holders.doubt()

    def end(self) -> None:
        """Nobody will need the copies any more. What was given up before stays so: nodes that are away may have it."""
        self._sets, self._nodes, self._asked, self._due = CopySets(self._sets.lineage), [], None, 0
        self.holders.end()  # their exits are heard, and are no trouble
        if self._every:
            self._processes.rooms.release(self._job_id)
