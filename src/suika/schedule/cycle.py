"""The scheduling cycle: one loop for both worlds. A policy decides; here its decisions are checked and put in order.

1. decide    users' words first, then jobs off slow devices, then the policy for all the rest
2. check     each decision against the rules that no policy may break
3. depend    who waits for whose devices; circular swaps are broken by a shrink, else rejected
4. settle    tenants' quotas: cut down to maxima, give owners back what is lent; then depend again
5. order     predecessors first; ranks stand where the least moves
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from suika.core.cluster import Device
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.policy import Policy
from suika.core.snapshot import Snapshot
from suika.schedule.board import Board, board_of
from suika.schedule.kinds import decide
from suika.schedule.quotas import within_maxima
from suika.schedule.realise import option_on
from suika.schedule.reclaim import over_maximum, settle
from suika.schedule.slow import leave
from suika.schedule.waiting import same_cut, why_waits
from suika.schedule.wishes import honour


@dataclass(frozen=True)
class Step:
    """A checked decision. A driver starts it once every job in `after` has released its devices and `not_before_s`,
    when devices promised earlier come free, has come; if one of them fails, this step is cancelled."""

    decision: Decision
    after: tuple[str, ...] = ()
    not_before_s: float = 0.0


@dataclass(frozen=True)
class CycleResult:
    """`steps` with predecessors first; `rejected` decisions with what is wrong with them.

    `unfinished`: a circle of moves was broken; ask again as soon as the steps have released their devices.
    """

    snapshot: Snapshot
    steps: tuple[Step, ...]
    rejected: tuple[tuple[Decision, Reason], ...] = ()
    unfinished: bool = False
    said: Mapping[str, Reason] = field(default_factory=dict)  # by the policy, of jobs that it lets wait

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return tuple(step.decision for step in self.steps)

    @cached_property
    def waits(self) -> Mapping[str, Reason]:
        """Why each job waits that holds nothing after this cycle, as one stable code and one sentence."""
        gets = {step.decision.job_id: step.decision for step in self.steps}
        told = {decision.job_id: reason for decision, reason in self.rejected}
        out: dict[str, Reason] = {}
        free, held = self._free_afterwards, self._held_afterwards
        for job in self.snapshot.jobs:
            decision = gets.get(job.id)
            if decision is not None and decision.action is Action.PREEMPT:
                out[job.id] = decision.reason
            elif decision is None and not job.running:
                reason = told.get(job.id) or why_waits(self.snapshot, job, free, held)
                # What the policy says is about devices that are free and would do.
                out[job.id] = self.said.get(job.id, reason) if reason.code is ReasonCode.QUEUED else reason
        return out

    @cached_property
    def _held_afterwards(self) -> Mapping[str, int]:
        """Devices per tenant once every step is done."""
        gets = {decision.job_id: decision.devices for decision in self.decisions}
        held: dict[str, int] = {}
        for job in self.snapshot.jobs:
            held[job.tenant] = held.get(job.tenant, 0) + len(gets.get(job.id, job.devices))
        return held

    @cached_property
    def _free_afterwards(self) -> np.ndarray:
        """[N] devices per node that nobody holds once every step is done."""
        board = board_of(self.snapshot)
        free = board.free_per_node.copy()
        node_of, at = board.fabric.node_of, board.fabric.position
        for decision in self.decisions:
            held = {at[d] for d in self.snapshot.job_of[decision.job_id].devices}
            gets = {at[d] for d in decision.devices}
            for position in held - gets:
                free[node_of[position]] += not (board.must_leave[position] or board.slow[position])
            for position in gets - held:
                free[node_of[position]] -= 1
        return free


def run_cycle(snapshot: Snapshot, policy: Policy) -> CycleResult:
    """Ask `policy` what to do at `snapshot`, and return what may be done, in order."""
    board = board_of(snapshot)
    wishes, planned = honour(snapshot)
    away, planned = leave(planned)
    shown = within_maxima(board_of(planned))
    decided = decide(shown, policy)
    wanted = wishes + away + [decision for decision in decided if decision.action is not Action.WAIT]
    accepted, rejected = _check(board, wanted)
    accepted, after, broken = _depend(board, accepted, rejected)
    accepted = _without_idle_stops(snapshot, accepted)
    if snapshot.quotas:
        settled = settle(board_of(planned), accepted)
        accepted, after, again = _depend(board, settled, rejected, within=over_maximum)
        broken = broken or again
    placed = {job_id: _placed(snapshot, decision) for job_id, decision in accepted.items()}
    steps = tuple(
        Step(placed[job_id], tuple(sorted(after[job_id])), _promised_until_s(snapshot, accepted[job_id]))
        for job_id in _in_order(accepted, after)
    )
    said = {decision.job_id: decision.reason for decision in decided if decision.action is Action.WAIT}
    return CycleResult(snapshot, steps, tuple(rejected), broken, said)


def _without_idle_stops(snapshot: Snapshot, accepted: Mapping[str, Decision]) -> dict[str, Decision]:
    """A policy's stop of a job whose devices nobody gets in this cycle is called off: whoever they were for was refused
    them, or found no place."""
    taken = {device for decision in accepted.values() for device in decision.devices}

    def idle(decision: Decision) -> bool:
        stops = decision.action is Action.PREEMPT and decision.reason.code is ReasonCode.PREEMPT
        return stops and taken.isdisjoint(snapshot.job_of[decision.job_id].devices)

    return {job_id: decision for job_id, decision in accepted.items() if not idle(decision)}


def _placed(snapshot: Snapshot, decision: Decision) -> Decision:
    """A move's devices in the rank order in which the least moves: here once, for both worlds."""
    if decision.action is not Action.REDEPLOY or decision.layout is None:
        return decision
    job = snapshot.job_of[decision.job_id]
    devices = snapshot.move_cost.place(job, decision.layout, decision.devices)
    return decision if devices == decision.devices else replace(decision, devices=devices)


Rejected = list[tuple[Decision, Reason]]
_UNBROKEN = Reason(
    ReasonCode.NO_FREE_DEVICES, "it and others would have to change places at once, and none of them may be stopped"
)
Rule = Callable[[Snapshot, Mapping[str, Decision]], tuple[str, Reason] | None]  # who breaks it, and how; None: nobody


def _check(board: Board, wanted: Iterable[Decision]) -> tuple[dict[str, Decision], Rejected]:
    accepted: dict[str, Decision] = {}
    rejected: Rejected = []
    taken: dict[Device, str] = {}
    for decision in wanted:
        problem = _problem(board, decision, taken, accepted)
        if problem is None:
            accepted[decision.job_id] = decision
            taken.update(dict.fromkeys(decision.devices, decision.job_id))
        else:
            rejected.append((decision, problem))
    return accepted, rejected


def _problem(
    board: Board, decision: Decision, taken: Mapping[Device, str], accepted: Mapping[str, Decision]
) -> Reason | None:
    """What no policy may do, as a reason; None if the decision breaks no rule by itself."""
    snapshot, job = board.snapshot, board.snapshot.job_of.get(decision.job_id)
    if job is None:
        return Reason(ReasonCode.UNSATISFIABLE, f"there is no job {decision.job_id}")
    if job.id in accepted:
        return Reason(ReasonCode.QUEUED, "decided twice in one cycle")
    if job.pinned and job.running:
        return Reason(ReasonCode.USER, "its user does not let it be stopped or moved")
    if job.locked_at(snapshot.now_s):
        return Reason(ReasonCode.MOVE_IN_FLIGHT, f"a move is in flight until {job.moving_until_s} s")
    if (decision.action is Action.START) == job.running:
        return Reason(ReasonCode.QUEUED, f"cannot {decision.action} a job that is {job.state}")
    if decision.layout is None:
        kept = decision.action is Action.PREEMPT and not job.stoppable
        return Reason(ReasonCode.USER, "its user does not let it be stopped") if kept else None
    num = len(decision.devices)
    if not job.min_devices <= num <= job.max_devices:
        range_ = f"{job.min_devices}..{job.max_devices}"
        return Reason(ReasonCode.UNSATISFIABLE, f"{num} devices are outside the job's range {range_}")
    if job.fixed_layout is not None and not same_cut(decision.layout, job.fixed_layout):
        return Reason(ReasonCode.USER, f"the user fixed the layout {job.fixed_layout}")
    if len(set(decision.devices)) < num:
        return Reason(ReasonCode.UNSATISFIABLE, "names a device twice")
    for device in decision.devices:
        at = board.fabric.position.get(device)
        if at is None or board.must_leave[at]:
            return Reason(ReasonCode.DEVICE_LOST, f"{device} is down, draining or not in the cluster")
        if device in taken:
            return Reason(ReasonCode.NO_FREE_DEVICES, f"{device} was given to job {taken[device]} in this cycle")
    return None


def _depend(
    board: Board, accepted: dict[str, Decision], rejected: Rejected, within: Rule = lambda snapshot, accepted: None
) -> tuple[dict[str, Decision], dict[str, set[str]], bool]:
    """The decisions that can be carried out; for each the jobs whose release it waits for; whether a circle was broken.

    A device held by a job that does not give it up makes a decision impossible. In a circle one member shrinks onto
    devices that it keeps anyway, or else stops, and goes on from there in a later cycle; where none may be stopped one
    stays as it is.
    """
    broken = False
    while True:
        after, impossible = _predecessors(board, accepted)
        impossible = impossible or within(board.snapshot, accepted)
        if impossible is None:
            circle = _circle(after)
            if circle is None:
                return accepted, after, broken
            first = _shrink(board, accepted, circle) or _stop_one(board, accepted, circle)
            if first is not None:
                broken = True
                accepted = {**accepted, first.job_id: first}
                continue
            impossible = max(circle, key=list(accepted).index), _UNBROKEN
        job_id, reason = impossible
        rejected.append((accepted[job_id], reason))
        accepted = {key: decision for key, decision in accepted.items() if key != job_id}


def _predecessors(
    board: Board, accepted: Mapping[str, Decision]
) -> tuple[dict[str, set[str]], tuple[str, Reason] | None]:
    after: dict[str, set[str]] = {job_id: set() for job_id in accepted}
    kept = {job_id: set(decision.devices) for job_id, decision in accepted.items()}
    for job_id, decision in accepted.items():
        for device in decision.devices:
            holder = int(board.holder[board.fabric.position[device]])
            if holder < 0 or board.jobs[holder].id == job_id:
                continue
            other = board.jobs[holder].id
            if other not in accepted or device in kept[other]:
                return after, (job_id, Reason(ReasonCode.NO_FREE_DEVICES, f"job {other} keeps {device}"))
            after[job_id].add(other)
    return after, None


def _circle(after: Mapping[str, set[str]]) -> list[str] | None:
    """Jobs on circular waits; None if there are none. Who only waits for such a job, or only holds one up, is not."""
    left = dict(after)
    while True:
        awaited = set().union(*left.values()) if left else set()
        loose = [job_id for job_id, others in left.items() if job_id not in awaited or not others & left.keys()]
        if not loose:
            return list(left) or None
        for job_id in loose:
            del left[job_id]


def _stop_one(board: Board, accepted: Mapping[str, Decision], circle: list[str]) -> Decision | None:
    """A stop of the member of `circle` that was decided last, of those that may be stopped."""
    may = [job_id for job_id in accepted if job_id in circle and board.snapshot.job_of[job_id].stoppable]
    if not may:
        return None
    sentence = "stops first, to break a circle of moves; goes on when the others have released its devices"
    return Decision(may[-1], Action.PREEMPT, Reason(ReasonCode.MAKE_ROOM, sentence))


def _shrink(board: Board, accepted: Mapping[str, Decision], circle: list[str]) -> Decision | None:
    """A shrink of one member of `circle` onto some of the devices that it keeps anyway, if it has an option there."""
    for job_id in circle:
        job = board.snapshot.job_of[job_id]
        kept = [d for d in job.devices if d in set(accepted[job_id].devices)]
        if not kept or len(kept) == len(accepted[job_id].devices):
            continue
        found = option_on(board, job, kept)
        if found is not None:
            layout, devices = found
            reason = Reason(ReasonCode.SHRINK, "gives up devices first, to break a circle of moves")
            return Decision(job_id, Action.REDEPLOY, reason, layout, devices)
    return None


def _in_order(accepted: Mapping[str, Decision], after: Mapping[str, set[str]]) -> list[str]:
    """Job ids, predecessors first, otherwise as decided."""
    ordered: list[str] = []
    placed: set[str] = set()
    waiting = list(accepted)
    while waiting:
        ready = [job_id for job_id in waiting if after[job_id] <= placed]
        assert ready, "circles were broken before"
        ordered += ready
        placed.update(ready)
        waiting = [job_id for job_id in waiting if job_id not in placed]
    return ordered


def _promised_until_s(snapshot: Snapshot, decision: Decision) -> float:
    return max((snapshot.promised.get(device, 0.0) for device in decision.devices), default=0.0)
