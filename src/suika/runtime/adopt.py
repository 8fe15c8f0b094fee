"""A `JobRun` over processes that run already: they train on while a new coordinator takes them over.

What the ranks do is theirs and goes on; what their old coordinator was in the midst of is settled by the owner's
record. A move whose commit is on record goes forward, any other one back, at whatever point it was: until a verdict
comes the ranks wait with both generations intact. A start that was not on record as done is begun anew by the owner.
Of a job that waits there may be holders, whose copies it was to start from.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from suika.core.cluster import Device
from suika.core.decision import Reason
from suika.core.plan import Plan
from suika.core.redeployment import Phase, Redeployment
from suika.runtime import setup
from suika.runtime.coordinator import JobRun
from suika.runtime.copysets import Lineage
from suika.runtime.events import Moving, Outcome, Released
from suika.runtime.gang import DiedError, Member
from suika.runtime.messages import Message

Claim = Callable[[str, Callable[[Message], None]], None]


class ProcessName(NamedTuple):
    """`job.generation.node/index` of a rank (the generation in which it was forked), `job.store.hex` of a store,
    `job.holder.node.hex` of a holder, `job.setup.generation.number.node` of what prepares a node."""

    job_id: str
    device: Device | None
    held_on: str | None = None  # a holder's node

    @staticmethod
    def parse(text: str) -> ProcessName:
        job_id, kind, rest = text.split(".", 2)
        if kind == "holder":
            return ProcessName(job_id, None, rest.rpartition(".")[0])
        return ProcessName(job_id, None if kind in ("store", setup.KIND) else Device.parse(rest))


@dataclass(frozen=True)
class OnRecord:
    """What the owner knows of the job. `move`: (target, its generation) of one that was in flight; `committed`: it is
    on record as committed, and `plan` and `generation` are the new ones. `lineage`: which copies in memory are of its
    present history."""

    plan: Plan
    generation: int
    step: int
    reason: Reason
    snapshot: tuple[str, int] | None = None
    lineage: Lineage = field(default_factory=Lineage)
    move: tuple[Plan, int] | None = None
    committed: bool = False
    leaving: Outcome | None = None  # all was saved and the ranks were being let go: one that is gone is no loss
    started: bool = True  # False: its start was not done; it is ended, and begun anew by its owner


def take_back(run: JobRun, record: OnRecord, found: Mapping[str, int], claim: Claim) -> Future[int]:
    """Make `found` (process -> pid) the processes of the fresh `run`. `claim` gives their events to a listener.

    Resolves with the steps done. If a rank of the present generation is missing, all are ended and `Ended(LOST)` names
    the snapshot to go on from, as for any death.
    """
    run.orders.taking_back = True
    return run.command(lambda: _take_back(run, record, found, claim))


class Answer(NamedTuple):
    """`copies`: the name of those that can be had whole; None: not from these holders. `final`: they were ended."""

    copies: str | None
    final: bool = False


def take_back_copies(
    run: JobRun,
    lineage: Lineage,
    snapshot: tuple[str, int] | None,
    found: Mapping[str, str],
    claim: Claim,
    last: bool,
    in_time: bool,
) -> Future[Answer]:
    """Make holders `found` (process -> node) those of the fresh `run` of a job that waits to start again from what they
    have, all of `lineage`. `last`: no more will come; if they do not suffice they are ended, but while it is `in_time`
    not before all of them have surely answered."""

    def take() -> Answer:
        run.keeper.newest = snapshot or (None, 0)
        run.step = lineage.step or 0
        _take_in_holders(run, found, claim, lineage)
        best = run.copies.best_known()
        if best is not None:
            return Answer(best.name)
        final = last and (run.copies.holders.all_surely_answered or not in_time)
        if final:
            run.copies.end()
        return Answer(None, final)

    return run.command(take)


def join_copies(run: JobRun, found: Mapping[str, str], claim: Claim) -> Future[None]:
    """Give `run`, which has been taken back, holders whose node came later than the others."""

    return run.command(lambda: _take_in_holders(run, found, claim))


def _take_in_holders(run: JobRun, found: Mapping[str, str], claim: Claim, lineage: Lineage | None = None) -> None:
    run.copies.take_back(found, lineage)
    for process in found:
        claim(process, run.gang.post)
    if found:
        run.copies.welcome()


def _take_back(run: JobRun, record: OnRecord, found: Mapping[str, int], claim: Claim) -> int:
    run.orders.taking_back = False
    members = _members(run, found)
    holders = {process: node for process in found if (node := ProcessName.parse(process).held_on) is not None}
    run.copies.take_back(holders, record.lineage)
    run.adopt(record.plan, record.generation, {d: m for d, m in members.items() if d in record.plan.devices})
    run.step = record.step
    if record.snapshot is not None:
        run.keeper.newest = record.snapshot
    for process in found:
        claim(process, run.gang.post)
    run.gang.kill([member for member in run.gang.members.values() if setup.is_of(member.process)])
    run.copies.welcome()
    if not record.started:
        raise DiedError(Member(run.job_id, None, 0.0), "was starting when its controller ended", 0.0)
    missing = [device for device in record.plan.devices if device not in members]
    if missing and record.leaving is not None:
        run.gang.kill(run.gang.members.copy().values())
        assert record.snapshot is not None
        run.step = record.snapshot[1]
        run.ended(record.leaving, None)
        return run.step
    if missing:
        raise DiedError(Member(f"{run.job_id} on {missing[0]}", missing[0], 0.0), "was gone at the restart", 0.0)
    others = {device: member for device, member in members.items() if device not in record.plan.devices}
    if record.move is not None:
        _settle(run, record, others)
    elif others:
        run.gang.kill(others.values())
    return run.step


def _members(run: JobRun, found: Mapping[str, int]) -> dict[Device, Member]:
    """The ranks by device. Rendezvous stores are kept, since groups may need theirs, but no new rank joins one."""
    ranks: dict[Device, Member] = {}
    for process, pid in found.items():
        _, device, held_on = ProcessName.parse(process)
        if held_on is not None:
            continue
        member = run.gang.members[process] = Member(process, device, time.monotonic(), pid=pid)
        if device is not None:
            ranks[device] = member
    return ranks


def _settle(run: JobRun, record: OnRecord, others: dict[Device, Member]) -> None:
    """The verdict that the ranks may be waiting for; one that has it already does not heed it. `others` go."""
    assert record.move is not None
    target, number = record.move
    do, phase = ("commit", Phase.COMMIT) if record.committed else ("abort", Phase.ABORTED)
    run.gang.tell(run.gang.members.values(), do, generation=number)
    error = None if record.committed else "the controller was restarted"
    run.emit(
        Moving(
            run.job_id, number, Redeployment(run.job_id, number, record.plan, target, record.reason, phase, error=error)
        )
    )
    if record.committed:
        run.gang.dismiss(others.values())
    else:
        run.gang.kill(others.values())
    run.emit(Released(run.job_id, number, tuple(others)))
