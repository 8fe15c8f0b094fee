"""Bring a plan within the tenants' quotas: cut down to maxima, and give owners what is guaranteed to them.

The jobs of a plan are stood on the topology once more, in this order: what nobody may touch; who is cut to a maximum;
jobs that give back a borrowed part; what is owed; then all that is lent, which stays where it stands if nobody took its
devices, else moves, shrinks or stops. Of several ways that which takes the least from borrowers is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Snapshot
from suika.plan.mapping import map_ranks
from suika.schedule.board import Board
from suika.schedule.menu import menu_of
from suika.schedule.quotas import Dues, by_claim, dues
from suika.schedule.realise import KEEP, Floor, Target
from suika.schedule.waiting import same_cut


def settle(board: Board, accepted: Mapping[str, Decision]) -> dict[str, Decision]:
    """`accepted` decisions (which can all be carried out), changed as quotas demand."""
    snapshot, kept = board.snapshot, dict(accepted)
    wronged: set[str] = set()
    displaced: dict[int, int] = {}
    while True:
        planned = Board(carried_out(snapshot, kept.values()))
        due = replace(dues(planned, snapshot.quotas, kept), displaced=displaced)
        more = {board.jobs[n].id for n in due.owed if len(board.positions[n]) > len(planned.positions[n])} - wronged
        if not more:
            return _Settlement(board, planned, kept, due).decisions() if due else kept
        # What the plan takes from an owner stays where it is; who was to have it looks for something else.
        wronged |= more
        kept, displaced = _without(board, accepted, wronged)


def _without(
    board: Board, accepted: Mapping[str, Decision], wronged: set[str]
) -> tuple[dict[str, Decision], dict[int, int]]:
    """Decisions without those about `wronged` jobs and without those that need their devices; and the jobs that thereby
    hold nothing, with the devices that they were to have."""
    number = {job.id: n for n, job in enumerate(board.jobs)}
    kept = {job_id: decision for job_id, decision in accepted.items() if job_id not in wronged}
    displaced: dict[int, int] = {}
    taken = {device for job_id in wronged for device in board.snapshot.job_of[job_id].devices}
    while True:
        losing = [decision for decision in kept.values() if taken & set(decision.devices)]
        if not losing:
            return kept, displaced
        for decision in losing:
            job = board.snapshot.job_of[decision.job_id]
            del kept[job.id]
            others = {device for other in kept.values() for device in other.devices} | taken
            if job.running and (not job.stoppable or not others & set(job.devices)):
                taken |= set(job.devices)  # stays as it is
            else:
                displaced[number[job.id]] = len(decision.devices)
                if job.running:
                    kept[job.id] = Decision(job.id, Action.PREEMPT, _DISPLACED)


_DISPLACED = Reason(ReasonCode.MAKE_ROOM, "gives back devices that it borrowed")


def carried_out(snapshot: Snapshot, decisions: Iterable[Decision]) -> Snapshot:
    """The snapshot as if every decision were carried out at once and for free."""
    changed = {}
    for decision in decisions:
        job = snapshot.job_of[decision.job_id]
        state = JobState.RUNNING if decision.devices else JobState.QUEUED
        changed[job.id] = replace(
            job, state=state, devices=decision.devices, layout=decision.layout, observed_step_s=None
        )
    return replace(snapshot, jobs=tuple(changed.get(job.id, job) for job in snapshot.jobs))


@dataclass
class _Way:
    """One way to settle: the floor that it leads to, and how many of those owed have their place."""

    floor: Floor
    num_owed: int


class _Settlement:
    """`board`: as things are; `planned`: as they would be. Jobs have the same numbers on both."""

    def __init__(self, board: Board, planned: Board, accepted: Mapping[str, Decision], due: Dues) -> None:
        self.board, self.planned, self.accepted, self.due = board, planned, accepted, due
        everybody = by_claim(planned, range(len(planned.jobs)))
        untouched = [n for n in everybody if planned.running[n] and n not in due.sizes and n not in due.owed]
        held = planned.num_held
        lent = [n for n in untouched if not due.sure.get(n)]
        self.lent = sorted(lent, key=lambda n: board.jobs[n].stoppable)  # who may not be stopped finds a place first
        partly = [n for n in untouched if 0 < due.sure.get(n, 0) < held[n]]
        self.partly = sorted(partly, key=lambda n: (due.sure[n] - int(held[n]), -n))  # most to give first
        self.sure = [n for n in untouched if due.sure.get(n) == held[n]]
        self.waiting = [n for n in everybody if not planned.running[n] and n not in due.owed]
        # May not be left out; who must leave its devices and finds no others stays until it does: nobody may have them.
        word = [n for n in everybody if board.running[n] and not board.jobs[n].stoppable]
        firm = [n for n in (*self.sure, *self.partly, *due.owed, *word) if planned.running[n]]
        self.leaving = {n for n in firm if planned.evicted[n]}
        self.firm = [n for n in firm if n not in self.leaving]

    def decisions(self) -> dict[str, Decision]:
        best: _Way | None = None
        for way in self._ways():
            if not all(way.floor.placed[number] for number in self.firm):
                continue
            if best is None or way.num_owed > best.num_owed:
                best = way
            if best.num_owed == len(self.due.owed):
                break
        if best is None:
            return dict(self.accepted)
        self._use_what_is_left(best.floor)
        return self._as_decisions(best.floor)

    def _ways(self) -> Iterator[_Way]:
        """From the least intrusive on: only what is lent goes; as much of borrowed parts as is missing; whole borrowed
        parts of more and more jobs; sure jobs make room too, at no less than they have."""
        yield self._stand({})
        if self.due.owed:
            yield self._stand(self._as_missing())
            for give in sorted({min(2**k, len(self.partly)) for k in range(len(self.partly).bit_length() + 1)} - {0}):
                yield self._stand({n: self.due.sure[n] for n in self.partly[:give]})
            yield self._stand({n: self.due.sure[n] for n in self.partly}, movable=True)

    def _as_missing(self) -> dict[int, int]:
        """Sizes of jobs that give back so much of borrowed parts as is missing in sum."""
        planned, held = self.planned, self.planned.num_held
        missing = sum(options[0].num_devices - int(held[n]) for n, options in self.due.owed.items())
        missing -= int(planned.free_per_node.sum()) + int(held[self.lent].sum())
        sizes: dict[int, int] = {}
        for number in self.partly:
            if missing > 0:
                menu, has = menu_of(planned.fabric, planned.jobs[number]), int(held[number])
                sizes[number] = max(menu.size_for(max(has - missing, 0)), self.due.sure[number])
                missing -= has - sizes[number]
        return sizes

    def _stand(self, gives: Mapping[int, int], *, movable: bool = False) -> _Way:
        """`gives`: sizes to which jobs shrink, of those that borrowed a part. `movable`: whether sure jobs may be stood
        elsewhere."""
        planned, due = self.planned, self.due
        stays = [n for n in self.partly if n not in gives] + ([] if movable else self.sure)
        lent = self.lent
        if not due.owed:
            stays, lent = stays + lent, []
        pinned = np.zeros(len(planned.jobs), dtype=bool)
        pinned[stays] = True
        cut = [Target(n, size) for n, size in (*due.sizes.items(), *gives.items()) if size]
        firm = [Target(n, KEEP) for n in self.sure if movable]
        soft = [Target(n, KEEP) for n in lent]
        comers = [Target(n, options[0].num_devices) for n, options in due.owed.items()]
        floor = Floor(planned, [*cut, *comers, *firm, *soft], pinned)
        for target in cut:
            floor.place(target, rigid=False)
        num_owed = sum(self._place_owed(floor, number) for number in due.owed)
        for target in firm:
            floor.place(target, rigid=True, any_shape=True)
        left = [target for target in soft if not floor.place(target, rigid=False)]
        for target in left:
            floor.place_at_all(target, rigid=False)
        return _Way(floor, num_owed)

    def _place_owed(self, floor: Floor, number: int) -> bool:
        """In one of the shapes that its tenant is sure of; a job that runs and finds no room stays as it is."""
        if floor.place_as(number, self.due.owed[number]):
            return True
        if floor.intact[number]:
            floor.place(Target(number, KEEP), rigid=False)
        return False

    def _use_what_is_left(self, floor: Floor) -> None:
        """Devices that quotas took from one job are no use idle: others that wait start on them."""
        if not (self.due.sizes or self.due.displaced):
            return
        quotas, jobs = self.planned.snapshot.quotas, self.planned.jobs
        held: dict[str, int] = dict.fromkeys(quotas, 0)
        for number, job in enumerate(jobs):
            if job.tenant in held:
                held[job.tenant] += len(self._final(floor, number)[1])
        for number in sorted(self.waiting, key=lambda n: n not in self.due.displaced):
            job = jobs[number]
            menu, most = menu_of(self.planned.fabric, job), quotas[job.tenant].max if job.tenant in quotas else None
            if not menu or self.planned.locked[number] or floor.placed[number]:
                continue
            size = menu.size_for(self.due.displaced.get(number, menu.nums[0]))
            if most is not None:
                size = min(size, menu.size_for(most - held[job.tenant]))
                if held[job.tenant] + size > most:
                    continue
            if floor.place(Target(number, size), rigid=False) and job.tenant in held:
                held[job.tenant] += len(self._final(floor, number)[1])

    # -- what it comes to ----------------------------------------------------------------------------------------

    def _final(self, floor: Floor, number: int) -> tuple[Layout | None, list[int]]:
        """Layout and positions of a job on the floor; nothing if it waits."""
        if number in floor.given:
            option, positions = floor.given[number]
            return option.layout, positions
        if floor.placed[number] or number in self.leaving:
            return self.planned.jobs[number].layout, self.planned.positions[number].tolist()
        return None, []

    def _as_decisions(self, floor: Floor) -> dict[str, Decision]:
        """Those about what is lent come last: of a circle of moves the last decided is the first to stop."""
        made, jobs = dict(self.accepted), self.board.jobs
        lent = {number for number in range(len(jobs)) if not self.due.sure.get(number) and number not in self.due.owed}
        for number, job in sorted(enumerate(jobs), key=lambda entry: entry[0] in lent):
            layout, positions = self._final(floor, number)
            if _same(self.planned, number, layout, positions):
                continue  # as the policy wants it
            made.pop(job.id, None)
            if not _same(self.board, number, layout, positions):
                made[job.id] = self._decision(number, layout, positions)
        return made

    def _decision(self, number: int, layout: Layout | None, positions: list[int]) -> Decision:
        job = self.board.jobs[number]
        if layout is None:
            return Decision(job.id, Action.PREEMPT, self._why(number, job, 0))
        fabric = self.board.fabric
        devices = tuple(fabric.devices[p] for p in map_ranks(layout, positions, fabric))
        action = Action.REDEPLOY if job.running else Action.START
        return Decision(job.id, action, self._why(number, job, len(devices)), layout, devices)

    def _why(self, number: int, job: JobView, gets: int) -> Reason:
        quotas, had = self.board.snapshot.quotas, len(job.devices)
        if number in self.due.owed:
            code = ReasonCode.START if not had else ReasonCode.GROW if gets > had else ReasonCode.MIGRATE
            return Reason(code, f"{gets} devices that are its tenant's ({job.tenant}: {quotas[job.tenant]})")
        if number in self.due.sizes:
            sentence = f"tenant {job.tenant} may hold {quotas[job.tenant].max} devices together"
            code = ReasonCode.START if not had else ReasonCode.QUOTA
            return Reason(code, f"{gets} devices: {sentence}" if gets else sentence)
        if not had:
            return Reason(ReasonCode.START, f"{gets} devices that no other job may use or needs now")
        owners = ", ".join(sorted({self.board.jobs[n].tenant for n in self.due.owed}))
        gives = f"{had} -> {gets} devices" if gets != had else "moves"
        return Reason(ReasonCode.MAKE_ROOM, f"{gives}: what it borrowed goes back to {owners}")


def _same(board: Board, number: int, layout: Layout | None, positions: list[int]) -> bool:
    """Whether the job has exactly that on `board`."""
    had, has = board.positions[number], board.jobs[number].layout
    if set(positions) != set(had.tolist()):
        return False
    return layout is None or (has is not None and same_cut(has, layout))


def over_maximum(snapshot: Snapshot, accepted: Mapping[str, Decision]) -> tuple[str, Reason] | None:
    """The last decided growth of a tenant that would hold more than its maximum, and why it is refused; None if all
    stay within theirs. Jobs that cannot change now may leave a tenant above a maximum that was just lowered."""
    limits = {tenant: quota.max for tenant, quota in snapshot.quotas.items() if quota.max is not None}
    if not limits:
        return None
    held = dict.fromkeys(limits, 0)
    for job in snapshot.jobs:
        if job.tenant in held:
            decision = accepted.get(job.id)
            held[job.tenant] += len(job.devices if decision is None else decision.devices)
    for job_id in reversed(list(accepted)):
        job = snapshot.job_of[job_id]
        if held.get(job.tenant, 0) > limits.get(job.tenant, 0) and len(accepted[job_id].devices) > len(job.devices):
            return job_id, Reason(ReasonCode.QUOTA, f"tenant {job.tenant} may hold {limits[job.tenant]} devices")
    return None
