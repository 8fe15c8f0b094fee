"""What a cycle decided is carried out: each step begins when the devices that it waits for are released."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from suika.core.decision import Action
from suika.schedule.back_off import back_off_s
from suika.schedule.cycle import Step
from suika.simulate.charge import decision_s
from suika.simulate.jobs import Change
from suika.simulate.live import LiveJob
from suika.simulate.state import State


def carry_out(state: State, steps: Iterable[Step]) -> dict[str, float]:
    """Returns from when on others may use what each job gives up, by job id."""
    charge_s = decision_s(state.devices.fabric.num_devices, len(state.live))
    released_s: dict[str, float] = {}
    void: set[str] = set()  # jobs that give up no devices after all
    for step in steps:
        job_id = step.decision.job_id
        live = state.live[state.number_of[job_id]]
        if not void.isdisjoint(step.after):
            void.add(job_id)
        elif _fails(state, live, step):
            _fail(state, live, step, charge_s)
            void.add(job_id)
        else:
            not_before_s = max(state.now_s, step.not_before_s, *(released_s[other] for other in step.after))
            released_s[job_id] = _begin(state, live, step, not_before_s, charge_s)
    return released_s


def _begin(state: State, live: LiveJob, step: Step, begin_s: float, charge_s: float) -> float:
    """The job goes on as it was until `begin_s`. Returns from when on others may use what it gives up."""
    decision = step.decision
    live.touch(state.now_s)
    live.break_off(state.now_s)
    live.num_tries, live.num_failed = live.num_tries + 1, 0
    move = state.world.move_cost(live.view, decision.layout, decision.devices)
    release_s = begin_s + move.release_s
    had_run, old = live.record.first_start_s is not None, len(live.positions)
    state.hold(live, state.devices.positions_of(decision.devices), usable_s=release_s)
    live.layout, live.version = decision.layout, live.version + 1
    live.last_change_s = state.now_s
    if decision.action is Action.PREEMPT:
        live.stand_still(state.now_s)
    else:
        pause_s = move.pause_s + charge_s
        live.old_rate, live.rate = live.rate, state.devices.true_rate(live)
        live.begin_s, live.moving_until_s = begin_s, begin_s + pause_s
        live.charge_pause(pause_s)
        live.record.num_moves += decision.action is Action.REDEPLOY or live.view.has_state
        if live.record.first_start_s is None:
            live.record.first_start_s = begin_s
        state.expect_settled(live, live.moving_until_s)
        state.expect_end(live)
    if had_run:
        until_s = max(live.moving_until_s, live.begin_s)
        live.record.changes.append(
            Change(state.now_s, live.begin_s, until_s, old, len(live.positions), decision.reason.code)
        )
    state.refresh(live)
    return release_s


def _fails(state: State, live: LiveJob, step: Step) -> bool:
    """Whether this try to move a running job fails: drawn from (seed, job, number of the try)."""
    share = state.world.failing_moves
    if not share or step.decision.action is not Action.REDEPLOY:
        return False
    drawn = np.random.default_rng([state.world.seed, 20263, live.number, live.num_tries]).random()
    return bool(drawn < share)


def _fail(state: State, live: LiveJob, step: Step, charge_s: float) -> None:
    """The job loses the pause of the move, goes on where it was, and is left alone for longer each time."""
    live.touch(state.now_s)
    live.break_off(state.now_s)
    move = state.world.move_cost(live.view, step.decision.layout, step.decision.devices)
    # What it was on its way to, if a move was in flight, it has yet to reach: that pause goes on.
    live.begin_s = state.now_s
    live.moving_until_s = max(live.moving_until_s, state.now_s + move.pause_s + charge_s)
    live.old_rate = live.rate
    live.charge_pause(live.moving_until_s - state.now_s)
    live.num_tries, live.num_failed = live.num_tries + 1, live.num_failed + 1
    live.record.failed_moves += 1
    live.left_alone_until_s = live.moving_until_s + back_off_s(live.num_failed)
    live.version += 1
    state.left_alone.add(live.number)
    state.expect_settled(live, live.left_alone_until_s)
    state.expect_end(live)
    state.refresh(live)
