"""Slow devices: jobs leave them when that is worth a move; nobody is put on them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import POLICIES, Flat, after, check_floor, curve, job, on, random_snapshot, snapshot

from suika.core.cluster import Device
from suika.core.decision import Action
from suika.core.snapshot import JobView
from suika.schedule.board import board_of
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load

SLOW = Device("n0", 3)


def straggling(times: float = 2.0, steps: float = 1e5, num: int = 8) -> JobView:
    """A gang on n0/0 .. with one device that takes `times` as long."""
    gang = job("a", steps, curve((num,), power=1.0), min_devices=num, max_devices=num)
    view = on(gang, *(f"n0/{i}" for i in range(num)))
    return replace(view, observed_step_s=view.curve.options[0].step_s * times)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_leaves_a_slow_device_under_every_policy(policy: str):
    state = snapshot("2x8:cpu", replace(straggling(), requested_devices=8), slow={SLOW: 2.0})
    (step,) = run_cycle(state, load(policy)).steps
    assert step.decision.action is Action.REDEPLOY
    assert {device.node for device in step.decision.devices} == {"n1"}
    assert str(step.decision.reason.code) == "migrate"
    assert "n0/3 takes 2.0 times as long" in step.decision.reason.sentence
    done = replace(after(run_cycle(state, load(policy))), now_s=200.0)
    assert not run_cycle(done, load(policy)).steps, "nothing sends it back"


def test_it_stays_if_the_move_costs_more_than_it_gains():
    """100 s left at a quarter too slow: 20 s to gain, a pause of 10 s is not repaid twice."""
    near_end = straggling(times=1.25, steps=100.0 / (1.25 / 8))
    assert not run_cycle(snapshot("2x8:cpu", near_end, slow={SLOW: 1.25}), load("suika")).steps
    longer = replace(near_end, remaining_steps=3 * near_end.remaining_steps)
    assert run_cycle(snapshot("2x8:cpu", longer, slow={SLOW: 1.25}), load("suika")).steps


def test_without_other_devices_it_shrinks_off_or_stays():
    known = curve((4, 7, 8), power=1.0)
    view = on(job("a", 1e5, known, min_devices=4, max_devices=8), *(f"n0/{i}" for i in range(8)))
    half = replace(view, observed_step_s=2.0 / 8)
    (step,) = run_cycle(snapshot("1x8:cpu", half, slow={SLOW: 2.0}), load("suika")).steps
    assert len(step.decision.devices) == 7
    assert SLOW not in step.decision.devices
    mild = replace(view, observed_step_s=1.1 / 8)  # seven sound devices are slower than eight of which one lags
    assert not run_cycle(snapshot("1x8:cpu", mild, slow={SLOW: 1.1}), load("suika")).steps
    assert not run_cycle(snapshot("1x8:cpu", straggling(), slow={SLOW: 2.0}), load("suika")).steps


def test_slow_devices_are_given_to_nobody():
    slow = {Device("n0", i): 3.0 for i in range(4)}
    state = snapshot("1x8:cpu", job("a", 1e6, curve((1, 2, 4, 8), power=0.9)), slow=slow)
    assert board_of(state).num_usable == 4
    (step,) = run_cycle(state, load("suika")).steps
    assert not set(step.decision.devices) & slow.keys()
    assert len(step.decision.devices) == 4
    waits = snapshot("1x8:cpu", job("b", min_devices=8, max_devices=8), slow=slow, move_cost=Flat(1.0))
    assert "4 free" in run_cycle(waits, load("suika")).waits["b"].sentence


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(1.0, 5.0))
def test_any_slow_devices_leave_a_legal_floor(seed: int, times: float):
    state = random_snapshot(seed)
    held = [device for view in state.jobs for device in view.devices]
    slow = dict.fromkeys([*held[: seed % 5], *state.free[: seed % 3]], times)
    state = replace(state, slow=slow)
    for name in ("suika", "pollux"):
        result = run_cycle(state, load(name))
        assert not result.rejected
        done = after(result)
        check_floor(done)
        before = {view.id: set(view.devices) for view in state.jobs}
        for view in done.jobs:
            gained = set(view.devices) - before[view.id]
            mine = {d for d in gained if d in slow and d not in held}
            assert not mine, "a free slow device was handed out"
