"""What holds for every policy: legal, whole gangs, the same answer twice, nobody waits while he could run alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import POLICIES, Flat, after, check_floor, curve, job, on, random_snapshot, snapshot

from suika.core.decision import Action
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.quota import Quota
from suika.core.snapshot import Option, ScalingCurve, Snapshot
from suika.schedule.board import board_of
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load
from suika.schedule.policies.order import facts, give


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_decisions_are_legal_whole_and_repeatable(name: str, seed: int):
    state, policy = random_snapshot(seed), load(name)
    result = run_cycle(state, policy)
    assert not result.rejected
    assert run_cycle(replace(state), load(name)).steps == result.steps
    done = after(result)
    check_floor(done)
    leaving = [view for view in done.jobs if any(device.node in state.draining for device in view.devices)]
    assert not leaving, "somebody stays on a draining node"


@pytest.mark.parametrize("name", POLICIES)
def test_a_lone_job_gets_devices(name: str):
    state = snapshot("2x8:cpu", job("a", requested_devices=4))
    assert [step.decision.action for step in run_cycle(state, load(name)).steps] == [Action.START]


@pytest.mark.parametrize("name", POLICIES)
def test_a_move_in_flight_is_left_alone(name: str):
    moving = replace(on(job("a", 1e6), *(f"n0/{i}" for i in range(8))), moving_until_s=500.0)
    waiting = job("b", 1.0, submitted_s=1.0, requested_devices=8, min_devices=8)
    assert not run_cycle(snapshot("1x8:cpu", moving, waiting), load(name)).steps


@pytest.mark.parametrize("name", POLICIES)
def test_an_impossible_job_blocks_nobody(name: str):
    impossible = job("a", min_devices=3, max_devices=3, requested_devices=3)
    state = snapshot("1x8:cpu", impossible, job("b", submitted_s=1.0, requested_devices=1))
    result = run_cycle(state, load(name))
    assert [step.decision.job_id for step in result.steps] == ["b"]
    assert str(result.waits["a"].code) == "unsatisfiable"


def test_unknown_names_and_parameters_are_named():
    with pytest.raises(SpecError, match="unknown policy"):
        load("suica")
    with pytest.raises(SpecError, match="taxes"):
        load("suika", taxes=1)


# -- what rivals are not burdened with -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fifo", "fifo-backfill", "sjf", "srtf", "tiresias", "themis", "gavel"])
def test_a_rigid_gang_waits_for_a_good_shape(name: str):
    """8 devices on one node take 1 s per step, 7 + 1 take 8 s: a gang that took what is free first would be slow for
    its whole life."""
    shapes = ScalingCurve((Option((8,), Layout(dp=8), 1.0, ""), Option((7, 1), Layout(dp=8), 8.0, "")))
    gang = job("gang", 1e4, shapes, min_devices=8, max_devices=8, requested_devices=8, submitted_s=5.0)
    one = {"min_devices": 1, "max_devices": 1, "requested_devices": 1}
    blocks = [on(job(f"b{n}", 1e3, curve((1,)), **one), f"n{n}/0") for n in range(2)]
    assert not run_cycle(snapshot("2x8:cpu", *blocks, gang), load(name)).steps
    (step,) = run_cycle(snapshot("2x8:cpu", blocks[0], gang), load(name)).steps
    assert {device.node for device in step.decision.devices} == {"n1"}


def test_who_keeps_its_size_is_not_moved_for_one_that_comes_first():
    """Both nodes are in use by someone who stays; the newcomer, first in order, takes a smaller size beside them."""
    stays = [on(job(f"s{n}", 1e3, curve((2,)), min_devices=2, max_devices=2), f"n{n}/0", f"n{n}/1") for n in range(2)]
    node_only = ScalingCurve(tuple(o for o in curve((2, 4, 8)).options if len(o.shape) == 1))
    board = board_of(snapshot("2x8:cpu", *stays, job("new", 10.0, node_only, submitted_s=1.0)))
    known = facts(board)
    new = next(fact for fact in known if not fact.held)
    sizes = {fact.number: fact.held or 8 for fact in known}
    (made,) = give(board, [new, *(fact for fact in known if fact.held)], sizes)
    assert (made.job_id, len(made.devices)) == ("new", 4)


def test_sia_maximises_its_program():
    """Two jobs on 4 devices: an exhaustive search over their configurations agrees."""
    jobs = [job(f"j{i}", 1e4, curve((1, 2, 4), power=power), max_devices=4) for i, power in enumerate((0.9, 0.4))]
    held = [on(view, f"n0/{i}") for i, view in enumerate(jobs)]
    made = {view.id: len(view.devices) for view in after(run_cycle(snapshot("1x4:cpu", *held), load("sia"))).jobs}

    def value(size: int, power: float) -> float:
        restart = 1.0 if size == 1 else 100.0 / 110.0  # 100 s old, a pause of 10 s
        return 2.1 - (restart * size**power) ** -0.5 if size else 0.0

    best = max(
        ((a, b) for a in (0, 1, 2) for b in (0, 1, 2) if a + b <= 4), key=lambda p: value(p[0], 0.9) + value(p[1], 0.4)
    )
    assert (made["j0"], made["j1"]) == best


# -- what Suika's own policy promises ----------------------------------------------------------------------------


def devices_after(state: Snapshot, name: str = "suika") -> dict[str, int]:
    return {view.id: len(view.devices) for view in after(run_cycle(state, load(name))).jobs}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_higher_priority_never_gets_less(seed: int):
    """Monotone response: raising one waiting job above all others never takes it from running to waiting."""
    state = random_snapshot(seed, num_jobs=8)
    waiting = [view for view in state.jobs if not view.devices]
    if not waiting:
        return
    chosen = waiting[seed % len(waiting)].id
    before = devices_after(state)[chosen]
    raised = replace(state, jobs=tuple(replace(v, priority=9) if v.id == chosen else v for v in state.jobs))
    assert not before or devices_after(raised)[chosen]


def test_a_higher_tier_displaces_a_lower_one():
    known = curve((8,))
    low = on(job("low", 1e6, known, min_devices=8, max_devices=8), *(f"n0/{i}" for i in range(8)))
    high = job("high", 1e6, known, min_devices=8, max_devices=8, priority=1, submitted_s=1.0)
    assert devices_after(snapshot("1x8:cpu", low, high)) == {"low": 0, "high": 8}
    same = snapshot("1x8:cpu", low, replace(high, priority=0))
    assert devices_after(same) == {"low": 8, "high": 0}


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_quotas_hold(seed: int):
    state = replace(random_snapshot(seed), quotas={"red": Quota(max=6), "blue": Quota(max=12)})
    done = after(run_cycle(state, load("suika")))
    for tenant, quota in state.quotas.items():
        held = sum(len(view.devices) for view in done.jobs if view.tenant == tenant)
        assert held <= quota.max


def test_a_drained_node_is_emptied_by_moves_not_stops():
    state = snapshot("2x8:cpu", on(job("a", max_devices=4), "n0/0", "n0/1"), draining=frozenset({"n0"}))
    (step,) = run_cycle(state, load("suika")).steps
    assert step.decision.action is Action.REDEPLOY
    assert str(step.decision.reason.code) == "drain"
    assert {device.node for device in step.decision.devices} == {"n1"}


def test_of_two_alike_the_heavier_goes_first():
    alike = [
        job(name, 1e4, curve((8,)), min_devices=8, max_devices=8, submitted_s=at) for name, at in (("a", 0), ("b", 1))
    ]
    assert devices_after(snapshot("1x8:cpu", *alike)) == {"a": 8, "b": 0}
    heavy = replace(alike[1], weight=2.0)
    assert devices_after(snapshot("1x8:cpu", alike[0], heavy)) == {"a": 0, "b": 8}


# -- scenarios ------------------------------------------------------------------------------------------------------


def test_b44_a_shrink_wakes_the_waiter_in_the_same_round():
    """A job at 8 of 8 shrinks because a short one waits for 4; both hold exactly what they run on."""
    long = on(job("long", 1e6, curve((4, 8)), min_devices=4, max_devices=8), *(f"n0/{i}" for i in range(8)))
    short = job("short", 10.0, curve((4,)), min_devices=4, max_devices=4, submitted_s=1.0)
    state = snapshot("1x8:cpu", long, short, move_cost=Flat(1.0))
    result = run_cycle(state, load("suika"))
    assert [(s.decision.job_id, s.after) for s in result.steps] == [("long", ()), ("short", ("long",))]
    assert {view.id: len(view.devices) for view in after(result).jobs} == {"long": 4, "short": 4}


def test_b44_what_a_shrink_gives_up_goes_to_the_waiter_when_it_is_released():
    """Releases take 30 s here: the waiter starts after them, in the same round; nobody else is promised the devices."""
    long = on(job("long", 1e6, curve((4, 8)), min_devices=4, max_devices=8), *(f"n0/{i}" for i in range(8)))
    short = job("short", 10.0, curve((4,)), min_devices=4, max_devices=4, submitted_s=1.0)
    state = snapshot("1x8:cpu", long, short, move_cost=Flat(1.0, release_s=30.0))
    steps = run_cycle(state, load("suika")).steps
    assert [(step.decision.job_id, step.after) for step in steps] == [("long", ()), ("short", ("long",))]
    # While the shrink is in flight its devices are promised, and another that comes does not get what is the waiter's.
    shrunk, started = (step.decision for step in steps)
    moving = replace(long, devices=shrunk.devices, layout=shrunk.layout, moving_until_s=130.0)
    waiter = replace(short, devices=started.devices, layout=started.layout, moving_until_s=131.0)
    promised = dict.fromkeys(started.devices, 130.0)
    third = job("third", 5.0, curve((4,)), min_devices=4, max_devices=4, submitted_s=2.0)
    then = snapshot("1x8:cpu", moving, waiter, third, now_s=110.0, promised=promised)
    assert not run_cycle(then, load("suika")).steps


def test_b44_a_job_in_a_shrink_that_must_go_holds_nothing_afterwards():
    """It is shrinking when a job of a higher tier needs all devices: it is left alone until that ends, then stopped."""
    low = on(job("low", 1e6, curve((4, 8)), min_devices=4, max_devices=8), *(f"n0/{i}" for i in range(4)))
    high = job("high", 1e3, curve((8,)), min_devices=8, max_devices=8, priority=1, submitted_s=1.0)
    during = snapshot("1x8:cpu", replace(low, moving_until_s=130.0), high, now_s=110.0)
    assert not run_cycle(during, load("suika")).steps
    done = after(run_cycle(snapshot("1x8:cpu", low, high, now_s=131.0), load("suika")))
    assert {view.id: len(view.devices) for view in done.jobs} == {"low": 0, "high": 8}


def test_b65_noise_moves_at_most_once_and_no_move_costs_more_than_it_gains():
    """Move cost 120 s, a gain of 2 % with ten minutes left, 5 % noise on every estimate, 50 rounds."""
    import numpy as np

    rng = np.random.default_rng(0)
    base = curve((8, 16), power=0.03)  # twice the devices: 2 % faster
    view = on(job("a", 600.0 / 0.94, base, min_devices=8), *(f"n0/{i}" for i in range(8)))
    moves = 0
    for round_ in range(50):
        noisy = type(base)(
            tuple(replace(o, step_s=o.step_s * float(np.exp(0.05 * rng.standard_normal()))) for o in base.options)
        )
        state = snapshot("2x8:cpu", replace(view, curve=noisy), now_s=100.0 + round_, move_cost=Flat(120.0))
        moves += len(run_cycle(state, load("suika")).steps)
    assert moves == 0


def test_b66_no_eviction_without_a_start():
    """4 nodes of 8, each with 6 devices of higher and 2 of lower priority: a job of 8 cannot start, so nobody goes."""
    jobs = []
    for n in range(4):
        jobs.append(on(job(f"h{n}", 1e6, curve((6,)), min_devices=6, max_devices=6, priority=2), *_span(n, 0, 6)))
        jobs.append(on(job(f"l{n}", 1e6, curve((2,)), min_devices=2, max_devices=2), *_span(n, 6, 8)))
    node_only = type(curve())(tuple(o for o in curve((8,)).options if o.shape == (8,)))
    big = job("big", 1e4, node_only, min_devices=8, max_devices=8, priority=1, submitted_s=5.0)
    small = job("small", 10.0, submitted_s=6.0)
    result = run_cycle(snapshot("4x8:cpu", *jobs, big), load("suika"))
    assert not result.steps
    assert not run_cycle(snapshot("4x8:cpu", *jobs, big, small), load("suika")).rejected


def test_b66_small_parts_go_where_they_leave_whole_places():
    """Nodes with 2, 1, 1 free: a pair of singles takes the two single places, so that a job of 2 on one node fits."""
    blocks = [on(job("x", 1e6, curve((2,)), min_devices=2, max_devices=2), *_span(0, 0, 2))]
    blocks += [on(job(f"y{n}", 1e6, curve((3,)), min_devices=3, max_devices=3), *_span(n, 0, 3)) for n in (1, 2)]
    spread = type(curve())(tuple(o for o in curve((2,)).options if o.shape == (1, 1)))
    packed = type(curve())(tuple(o for o in curve((2,)).options if o.shape == (2,)))
    a = job("a", 100.0, spread, min_devices=2, max_devices=2, submitted_s=5.0)
    b = job("b", 1000.0, packed, min_devices=2, max_devices=2, submitted_s=6.0)
    done = after(run_cycle(snapshot("3x4:cpu", *blocks, a, b), load("suika")))
    where = {view.id: sorted(device.node for device in view.devices) for view in done.jobs}
    assert where["a"] == ["n1", "n2"]
    assert where["b"] == ["n0", "n0"]


def _span(node: int, start: int, stop: int) -> list[str]:
    return [f"n{node}/{i}" for i in range(start, stop)]


def test_sizes_between_hull_points_are_used_where_the_next_point_does_not_fit():
    """32 devices are free, and its hull goes from 16 to 64 at once: a job of a day takes 32."""
    steps = {4: 100.0, 16: 7.0, 32: 5.8, 64: 4.2}  # seconds
    options = tuple(Option((8,) * (n // 8) or (n,), Layout(dp=n), step_s, "") for n, step_s in steps.items())
    long = job("long", steps=20_000.0, known=ScalingCurve(options), min_devices=4, max_devices=64)
    firm = job("firm", 1e5, curve((32,)), min_devices=32, max_devices=32, pinned=True)
    firm = on(firm, *(f"n{n}/{d}" for n in range(4) for d in range(8)))
    result = run_cycle(snapshot("8x8:cpu", firm, long), load("suika"))
    assert {view.id: len(view.devices) for view in after(result).jobs} == {"firm": 32, "long": 32}


def test_others_make_room_for_who_finds_no_whole_node():
    """Half of each node is free, and the job needs a whole one: one of the two others moves, at its size."""
    four = ScalingCurve((Option((4,), Layout(dp=4), 1.0, ""),))
    here = on(job("here", steps=5000.0, known=four, min_devices=4, max_devices=4), *(f"n0/{d}" for d in range(4)))
    there = on(job("there", steps=50_000.0, known=four, min_devices=4, max_devices=4), *(f"n1/{d}" for d in range(4)))
    whole = job("whole", 1000.0, ScalingCurve((Option((8,), Layout(dp=8), 1.0, ""),)), min_devices=8, max_devices=8)
    result = run_cycle(snapshot("2x8:cpu", here, there, whole), load("suika"))
    assert {view.id: len(view.devices) for view in after(result).jobs} == {"here": 4, "there": 4, "whole": 8}
    assert len(result.decisions) == 2, "only one of them moves"
