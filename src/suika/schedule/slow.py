"""Slow devices: jobs leave them when that is worth a move, and nobody is put on them.

The same for every policy, which is asked afterwards about a snapshot in which such jobs are on their way. A job leaves
for devices that are free or its own and not slow, at the size that ends it soonest, if the time saved repays the pause
of the move twice, as growth must. Its pace without the slow device is its measured pace over the slowness of that.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.snapshot import JobView, Snapshot
from suika.schedule.board import Board
from suika.schedule.menu import menu_of
from suika.schedule.realise import Target, realise
from suika.schedule.wishes import carried_out_next, takes_from_others


def leave(snapshot: Snapshot) -> tuple[list[Decision], Snapshot]:
    """Decisions that take jobs off slow devices, in order of submission, and the snapshot as it will be after them."""
    decisions: list[Decision] = []
    if not snapshot.slow:
        return decisions, snapshot
    for job in snapshot.jobs:
        stands = set(job.devices) & snapshot.slow.keys()
        if stands and not job.locked_at(snapshot.now_s) and job.moving_until_s is None:
            decision = _off(snapshot, job, max(snapshot.slow[device] for device in stands))
            if decision is not None:
                decisions.append(decision)
                snapshot = carried_out_next(snapshot, job, decision)
    return decisions, snapshot


def _off(snapshot: Snapshot, job: JobView, times: float) -> Decision | None:
    """The move that ends the job soonest, if it is worth its pause."""
    # As if its slow devices were down: it must leave them.
    leaves = set(job.devices) & snapshot.slow.keys()
    others = {device: slow for device, slow in snapshot.slow.items() if device not in leaves}
    board = Board(replace(snapshot, down=snapshot.down | leaves, slow=others))
    menu, number = menu_of(board.fabric, job), board.jobs.index(job)
    here_s = job.step_s
    if not menu or here_s is None or job.layout is None:
        return None
    step_s = {(o.shape, o.layout): o.step_s for o in job.curve.options}
    told_s = step_s.get((_shape(board, job), job.layout)) or menu.best[menu.size_for(len(job.devices))].step_s
    pace = here_s / times / told_s  # of the job on sound devices, against its curve
    left, pinned = job.remaining_at(snapshot.now_s), np.arange(len(board.jobs)) != number
    best: tuple[float, Decision] | None = None
    for size in (num for num in menu.nums if num <= len(job.devices)):
        made = realise(board, [Target(number, size)], pinned=pinned, rigid=True, any_shape=True)
        found = next((d for d in made if d.job_id == job.id and d.action is Action.REDEPLOY), None)
        if found is None or takes_from_others(snapshot, found):
            continue
        assert found.layout is not None
        there_s = pace * min(o.step_s for o in menu.all_of[size] if o.layout == found.layout)
        pause_s = snapshot.move_cost(job, found.layout, found.devices).pause_s
        end_s = left * there_s + pause_s
        if left * (here_s - there_s) > 2 * pause_s and (best is None or end_s < best[0]):
            best = end_s, found
    if best is None:
        return None
    slow = ", ".join(str(device) for device in job.devices if device in snapshot.slow)
    sentence = f"{slow} takes {times:.1f} times as long as its peers: {len(best[1].devices)} others as {best[1].layout}"
    return replace(best[1], reason=Reason(ReasonCode.MIGRATE, sentence))


def _shape(board: Board, job: JobView) -> tuple[int, ...]:
    positions = [board.fabric.position[device] for device in job.devices]
    return tuple(sorted((int(num) for num in np.bincount(board.fabric.node_of[positions]) if num), reverse=True))
