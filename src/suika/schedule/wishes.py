"""Users' words come first: a running job whose layout or size is not what its user wants is brought there.

The same for every policy: it is asked after, about a snapshot in which such jobs are on their way. A wish takes devices
that are free or the job's own, never another job's; what it lacks, it waits for, and the job trains on meanwhile.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.snapshot import JobView, Snapshot
from suika.schedule.board import Board, board_of
from suika.schedule.menu import menu_of
from suika.schedule.realise import Target, realise
from suika.schedule.waiting import same_cut


def honour(snapshot: Snapshot) -> tuple[list[Decision], Snapshot]:
    """Decisions that bring users' wishes about, in order of submission, and the snapshot as it will be after them."""
    decisions: list[Decision] = []
    for job in snapshot.jobs:
        if unmet(job) and (job.moving_until_s is None or job.moving_until_s <= snapshot.now_s):
            decision = _bring_about(board_of(snapshot), job)
            if decision is not None:
                decisions.append(decision)
                snapshot = carried_out_next(snapshot, job, decision)
    return decisions, snapshot


def unmet(job: JobView) -> bool:
    """Whether a running job is not what its user asked for since it was placed."""
    if not job.running or job.layout is None:
        return False
    if job.fixed_layout is not None and not same_cut(job.layout, job.fixed_layout):
        return True
    return not job.min_devices <= len(job.devices) <= job.max_devices


def _bring_about(board: Board, job: JobView) -> Decision | None:
    menu, number = menu_of(board.fabric, job), board.jobs.index(job)
    if not menu:
        return None
    others = np.arange(len(board.jobs)) != number
    target = Target(number, menu.size_for(len(job.devices)))
    made = realise(board, [target], pinned=others, rigid=True, any_shape=True)
    found = next((d for d in made if d.job_id == job.id and d.action is Action.REDEPLOY), None)
    if found is None or takes_from_others(board.snapshot, found):
        return None
    return replace(found, reason=Reason(ReasonCode.USER, f"{found.layout} as its user wants, after {job.layout}"))


def takes_from_others(snapshot: Snapshot, decision: Decision) -> bool:
    """Whether another job holds one of the decision's devices (one that must leave them itself counts as well)."""
    wanted = set(decision.devices)
    return any(wanted & set(job.devices) for job in snapshot.jobs if job.id != decision.job_id)


def carried_out_next(snapshot: Snapshot, job: JobView, decision: Decision) -> Snapshot:
    """The snapshot with `job` on its way where `decision` sends it, to be left alone."""
    assert decision.layout is not None
    move = snapshot.move_cost(job, decision.layout, decision.devices)
    moving = replace(
        job, layout=decision.layout, devices=decision.devices, moving_until_s=snapshot.now_s + move.pause_s
    )
    return replace(snapshot, jobs=tuple(moving if other is job else other for other in snapshot.jobs))
