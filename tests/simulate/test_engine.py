"""The engine's rules: what moves cost, who may use what when, what a failure costs; and that all of it adds up."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulate_cases import curve, mean_jct_s, random_jobs, sim_job, simulate, world

from suika.core.cluster import Cluster, Device, Node
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.quota import Quota
from suika.core.snapshot import JobView, Move, Option, ScalingCurve, Snapshot
from suika.schedule.cycle import CycleResult
from suika.schedule.policies import NAMES, load
from suika.simulate.charge import decision_s
from suika.simulate.engine import Engine
from suika.simulate.metrics import lower_bound_avg_jct_s, numbers
from suika.simulate.predictor import Lengths, Predictor
from suika.simulate.world import Failure, Slowdown, World

WHY = Reason(ReasonCode.USER, "as the test says")


@dataclass
class Script:
    """A policy that gives jobs devices at set times: {time: {job: devices}}; no devices: stop."""

    plan: dict[float, dict[str, tuple[str, ...]]]
    name: str = "script"
    round_s: float = 1.0
    done: set[float] = field(default_factory=set)

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        made = []
        for at_s, gives in self.plan.items():
            if at_s <= snapshot.now_s and at_s not in self.done:
                self.done.add(at_s)
                for job_id, names in gives.items():
                    devices = tuple(Device.parse(name) for name in names)
                    running = snapshot.job_of[job_id].running
                    action = Action.PREEMPT if not devices else Action.REDEPLOY if running else Action.START
                    layout = Layout(dp=len(devices)) if devices else None
                    made.append(Decision(job_id, action, WHY, layout, devices))
        return made


def devices(num: int, node: int = 0, first: int = 0) -> tuple[str, ...]:
    return tuple(f"n{node}/{first + i}" for i in range(num))


def test_a_job_alone_by_hand():
    """Launch 10 s + decision, then 100 steps of 1 s on one device."""
    where = world(sim_job("a", 5.0, 100.0))
    (record,) = Engine(where, Script({5.0: {"a": devices(1)}})).run().records
    assert record.jct_s == pytest.approx(110.0 + decision_s(16, 1))
    assert record.device_s == pytest.approx(record.jct_s)
    assert record.num_moves == 0


def test_a_move_stops_progress_and_holds_the_new_devices():
    """50 s at rate 1, 10 s of pause, the other steps at rate 2^0.8."""
    where = world(sim_job("a", 0.0, 100.0))
    (record,) = Engine(where, Script({0.0: {"a": devices(1)}, 60.0: {"a": devices(2)}})).run().records
    charge_s = decision_s(16, 1)
    did = 60.0 - 10.0 - charge_s
    expected = 60.0 + 10.0 + charge_s + (100.0 - did) / 2**0.8
    assert record.jct_s == pytest.approx(expected)
    assert record.num_moves == 1
    assert record.paused_s == pytest.approx(20.0 + 2 * charge_s)
    assert record.device_s == pytest.approx(60.0 + 2 * (expected - 60.0))


def test_a_move_broken_off_has_taken_the_time_it_ran():
    """Sent elsewhere 4 s into a pause of 10 s, and lost to a failure 6 s into the next one; resumed at 500 s."""
    where = world(sim_job("a", 0.0, 100.0), failures=(Failure(50.0, "n0", 100.0),))
    script = Script(
        {0.0: {"a": devices(1)}, 40.0: {"a": devices(2)}, 44.0: {"a": devices(4)}, 500.0: {"a": devices(1)}}
    )
    record = Engine(where, script).run().records[0]
    assert record.paused_s == pytest.approx(10.0 + 4.0 + 6.0 + 10.0, abs=0.1)
    assert record.paused_device_s == pytest.approx(10.0 + 4.0 * 2 + 6.0 * 4 + 10.0, abs=0.2)


def test_a_stopped_job_makes_no_progress():
    where = world(sim_job("a", 0.0, 100.0))
    script = Script({0.0: {"a": devices(1)}, 60.0: {"a": ()}, 500.0: {"a": devices(1)}})
    (record,) = Engine(where, script).run().records
    charge_s = decision_s(16, 1)
    assert record.jct_s == pytest.approx(500.0 + 10.0 + charge_s + 100.0 - (50.0 - charge_s))
    assert record.device_s == pytest.approx(record.jct_s - 440.0)


@dataclass(frozen=True)
class SlowRelease:
    """Devices come free 30 s after a move begins; its pause is 10 s."""

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        return Move(10.0, 30.0)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return 10.0


def test_others_receive_devices_at_release():
    """`a` shrinks at 100 s in favour of `b`, which begins 30 s later and trains 10 s after that."""
    where = replace(world(sim_job("a", 0.0, 1000.0), sim_job("b", 0.0, 10.0)), move_cost=SlowRelease())
    script = Script({0.0: {"a": devices(2)}, 100.0: {"a": devices(1), "b": devices(1, first=1)}})
    a, b = Engine(where, script).run().records
    assert b.first_start_s == pytest.approx(130.0)
    assert b.end_s == pytest.approx(130.0 + 10.0 + 10.0, abs=0.1)
    assert a.num_moves == 1


def test_a_job_trains_on_while_it_waits_for_devices():
    """`b` moves onto what `a` gives up 30 s later: until then it goes on as it was."""
    where = replace(world(sim_job("a", 0.0, 500.0), sim_job("b", 0.0, 200.0)), move_cost=SlowRelease())
    script = Script(
        {0.0: {"a": devices(2), "b": devices(1, first=2)}, 100.0: {"a": devices(1), "b": devices(2, first=1)}}
    )
    _, b = Engine(where, script).run().records
    charge_s = decision_s(16, 2)
    did = 130.0 - 10.0 - charge_s  # launched at 0, running from 10 s on until the move begins
    assert b.end_s == pytest.approx(130.0 + 10.0 + charge_s + (200.0 - did) / 2**0.8)


def test_a_move_that_had_not_begun_costs_nothing():
    """`b` ends 10 s before the devices that it was to move onto are released."""
    where = replace(world(sim_job("a", 0.0, 1000.0), sim_job("b", 0.0, 110.0)), move_cost=SlowRelease())
    script = Script(
        {0.0: {"a": devices(2), "b": devices(1, first=2)}, 100.0: {"a": devices(1), "b": devices(2, first=1)}}
    )
    _, b = Engine(where, script).run().records
    assert b.end_s == pytest.approx(120.0, abs=0.1)
    assert b.paused_s == pytest.approx(10.0, abs=0.01)


def test_changes_are_on_record_with_what_they_took():
    """A launch is none; a move broken off after 4 s has taken 4 s; a stop takes no time, its resume a pause."""
    plan = {40.0: {"a": devices(2)}, 44.0: {"a": devices(4)}, 60.0: {"a": ()}, 500.0: {"a": devices(1)}}
    (record,) = Engine(world(sim_job("a", 0.0, 100.0)), Script({0.0: {"a": devices(1)}, **plan})).run().records
    told = [(change.at_s, change.old, change.new) for change in record.changes]
    assert told == [(40.0, 1, 2), (44.0, 2, 4), (60.0, 4, 0), (500.0, 0, 1)]
    took_s = [change.until_s - change.begin_s for change in record.changes]
    assert took_s == pytest.approx([4.0, 10.0, 0.0, 10.0], abs=0.01)


@pytest.mark.parametrize("interruptible", [True, False])
def test_b65_a_job_whose_moves_fail_is_left_alone_for_longer_each_time(interruptible: bool):
    """Every try to move `a` fails: it loses a pause each time, trains on, and is decided about after 2, 4, 8, .. s."""
    where = replace(world(sim_job("a", 0.0, 2000.0), interruptible=interruptible), failing_moves=1.0)
    tries: list[float] = []

    class Restless(Script):
        def decide(self, snapshot: Snapshot) -> list[Decision]:
            (view,) = snapshot.jobs
            if view.running and not view.locked_at(snapshot.now_s) and view.moving_until_s is None and len(tries) < 6:
                tries.append(snapshot.now_s)
                return [Decision("a", Action.REDEPLOY, WHY, Layout(dp=2), devices_of(2))]
            return super().decide(snapshot)

    def devices_of(num: int) -> tuple[Device, ...]:
        return tuple(map(Device.parse, devices(num)))

    seen: list[Snapshot] = []
    script = Restless({0.0: {"a": devices(1)}})
    (record,) = Engine(where, script, on_cycle=lambda result: seen.append(result.snapshot)).run().records
    waits_s = [after - before - 10.0 for before, after in pairwise(tries)]
    assert waits_s == pytest.approx([2.0, 4.0, 8.0, 16.0, 32.0], abs=1.1)  # asked once a second
    assert (record.num_moves, record.failed_moves) == (0, 6)
    assert record.end_s == pytest.approx(7 * 10.0 + 2000.0, abs=0.1)
    while_left_alone = next(s for s in seen if tries[5] + 30.0 < s.now_s < tries[5] + 60.0)
    done = while_left_alone.now_s - 7 * 10.0
    assert while_left_alone.jobs[0].remaining_at(while_left_alone.now_s) == pytest.approx(2000.0 - done, abs=0.1)


def test_who_waits_for_a_move_that_fails_is_not_started():
    """`b` was to have what `a` gives up: it gets it once `a` gives it up."""
    where = replace(world(sim_job("a", 0.0, 300.0), sim_job("b", 0.0, 10.0)), failing_moves=1.0)
    both = {"a": devices(1), "b": devices(1, first=1)}
    a, b = Engine(where, Script({0.0: {"a": devices(2)}, 50.0: both, 400.0: {"b": devices(1)}})).run().records
    assert (a.num_moves, a.failed_moves) == (0, 1)
    assert b.first_start_s == pytest.approx(400.0)


@pytest.mark.parametrize("policy", ["suika", "rubick", "hesrpt"])
def test_every_job_ends_though_moves_fail(policy: str):
    where = replace(world(*random_jobs(4, num=16, load=2.0)), failing_moves=0.5)
    outcome = simulate(where, policy)
    assert all(record.end_s is not None for record in outcome.records)
    assert sum(record.failed_moves for record in outcome.records) > 0
    assert mean_jct_s(outcome) >= lower_bound_avg_jct_s(where)


@dataclass(frozen=True)
class SlowStart:
    """Starts are said to take 10 s and take 40."""

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        return Move(40.0, 0.0)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return 10.0


def test_b65_a_slow_start_is_no_failure():
    """Nobody sends a job elsewhere, or stops it, because it takes longer than was said to come up."""
    jobs = [sim_job(name, 0.0, 500.0, max_devices=4) for name in "abcd"]
    for record in simulate(replace(world(*jobs), move_cost=SlowStart())).records:
        assert not [change for change in record.changes if change.at_s < record.first_start_s + 40.0]


def test_a_policy_that_lets_jobs_wait_for_ever_is_named():
    with pytest.raises(SpecError, match="lets 1 jobs wait for ever: a"):
        Engine(world(sim_job("a", 0.0, 10.0)), Script({}, round_s=0.0)).run()


def test_a_failure_costs_what_was_done_since_the_last_snapshot():
    where = replace(world(sim_job("a", 0.0, 1000.0)), failures=(Failure(500.0, "n0", 100.0),), snapshot_every_s=200.0)
    (record,) = Engine(where, Script({0.0: {"a": devices(1)}, 501.0: {"a": devices(1, node=1)}})).run().records
    ran_s = 500.0 - 10.0 - decision_s(16, 1)
    assert record.lost_steps == pytest.approx(ran_s % 200.0)
    assert record.num_moves == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_ends_every_job(name: str):
    """No starvation: the engine's own assertions hold at each event, and the run ends."""
    where = world(*random_jobs(3, num=25), failures=(Failure(300.0, "n1", 600.0),))
    outcome = simulate(where, name)
    assert all(record.end_s is not None for record in outcome.records)
    assert all(record.device_s >= 0 for record in outcome.records)
    assert not outcome.num_rejected
    assert mean_jct_s(outcome) >= lower_bound_avg_jct_s(where)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 5.0, 300.0]))
def test_random_worlds_add_up(seed: int, pause_s: float):
    """Conservation (asserted inside), determinism, and device time that covers the work."""
    where = world(*random_jobs(seed, num=14), pause_s=pause_s)
    one, two = simulate(where), simulate(where)
    assert [r.end_s for r in one.records] == [r.end_s for r in two.records]
    for record in one.records:
        least = record.job.num_steps * record.job.least_device_s_per_step
        assert record.device_s >= least * (1 - 1e-6)
        assert record.jct_s >= record.job.num_steps * record.job.fastest_step_s * (1 - 1e-6) + pause_s


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_quotas_hold_at_every_cycle(seed: int):
    quotas = {"red": Quota(max=8), "blue": Quota(max=10)}
    jobs = [replace(job, min_devices=1, max_devices=8, requested_devices=1) for job in random_jobs(seed, num=12)]

    def check(result: CycleResult) -> None:
        held = dict.fromkeys(quotas, 0)
        gets = {d.job_id: len(d.devices) for d in result.decisions}
        for view in result.snapshot.jobs:
            held[view.tenant] += gets.get(view.id, len(view.devices))
        assert all(held[tenant] <= quota.max for tenant, quota in quotas.items())

    Engine(world(*jobs, quotas=quotas), load("suika"), on_cycle=check).run()


def test_no_ping_pong_under_noise():
    """5 % noise on every prediction: hardly more moves than without."""
    jobs = random_jobs(5, num=20)
    quiet = simulate(world(*jobs))
    noisy = simulate(world(*jobs, predictor=Predictor(noise=0.05)))
    assert max(record.num_moves for record in noisy.records) <= 6
    assert sum(r.num_moves for r in noisy.records) <= sum(r.num_moves for r in quiet.records) + len(jobs)


def test_canary_blind_does_not_beat_knowing():
    """Over several workloads the policy that is told lengths is better than the same policy without."""
    known, blind = [], []
    for seed in range(4):
        jobs = random_jobs(seed, num=25, load=2.0)
        known.append(mean_jct_s(simulate(world(*jobs))))
        blind.append(mean_jct_s(simulate(world(*jobs, predictor=Predictor(Lengths("blind"))))))
    assert np.mean(known) < np.mean(blind)


def test_canary_free_moves_help_and_dear_ones_hurt():
    jobs = random_jobs(7, num=25, load=2.0)
    free, some, dear = (mean_jct_s(simulate(world(*jobs, pause_s=pause_s))) for pause_s in (0.0, 30.0, 300.0))
    assert free < some < dear


def test_numbers_of_a_run():
    where = world(*random_jobs(2, num=10))
    found = numbers(where, simulate(where))
    assert found["jobs"] == 10
    assert found["p50_jct_s"] <= found["p95_jct_s"] <= found["p99_jct_s"] <= found["max_jct_s"] <= found["makespan_s"]
    assert found["avg_slowdown"] > 0
    assert found["worst_ftf"] > 0
    assert all(np.isfinite(value) for value in found.values())


def test_a_priority_is_never_worse_off():
    """Raising one job's priority does not make it end later (by more than a decision's own time)."""
    jobs = random_jobs(11, num=16, load=2.0)
    jobs = [replace(job, priority=0) for job in jobs]
    base = simulate(world(*jobs))
    for index in (4, 9, 13):
        raised = [replace(job, priority=5) if i == index else job for i, job in enumerate(jobs)]
        assert simulate(world(*raised)).records[index].end_s <= base.records[index].end_s + 1.0


def test_a_weight_is_never_worse_off():
    """A job that counts a hundred times as much does not end later, by more than a pause."""
    jobs = [replace(job, priority=0) for job in random_jobs(11, num=16, load=2.0)]
    base = simulate(world(*jobs))
    sooner = 0
    for index in (4, 9, 13):
        raised = [replace(job, weight=100.0) if i == index else job for i, job in enumerate(jobs)]
        end_s = simulate(world(*raised)).records[index].end_s
        assert end_s <= base.records[index].end_s + 10.0
        sooner += end_s < base.records[index].end_s - 1.0
    assert sooner


def stream(stoppable: bool) -> World:
    """A gang of 12 of 16 devices that would run for 200 s, and small jobs for two hours, more than there is room."""
    rng = np.random.default_rng(3)
    small = []
    for i in range(450):
        num = int(rng.choice([1, 2, 4]))
        name, known = f"s{i:03}", curve(1.0, float(num), sizes=(num,))
        steps = float(rng.uniform(30.0, 150.0))
        sizes = {"min_devices": num, "max_devices": num, "requested_devices": num}
        small.append(sim_job(name, 16.0 * i, steps, known, stoppable=stoppable, **sizes))
    gang = sim_job("gang", 50.0, 200.0, ScalingCurve((Option((8, 4), Layout(dp=12), 1.0, ""),)),
                   min_devices=12, max_devices=12, requested_devices=12)  # fmt: skip
    return world(gang, *small)


@pytest.mark.parametrize("stoppable", [True, False])
def test_a_big_gang_starts_within_a_bounded_time_under_a_stream_of_small_jobs(stoppable: bool):
    """Without a reservation it waits for the end of the stream. With one it starts when it has waited eight times its
    time alone, at most; or, where nobody may be stopped, once those have ended that run then. Devices are kept free for
    it no longer than the longest small job takes, and the price is small."""
    where = stream(stoppable)
    kept_s: list[float] = []

    def watch(result: CycleResult) -> None:
        if any(reason.code is ReasonCode.RESERVED for reason in result.waits.values()):
            kept_s.append(result.snapshot.now_s)

    without = simulate(where, reserve=1e9)
    late = next(r for r in without.records if r.job.id == "gang")
    outcome = Engine(where, load("suika"), on_cycle=watch).run()
    gang = next(r for r in outcome.records if r.job.id == "gang")
    waited_s = gang.first_start_s - gang.job.submit_s
    assert waited_s <= 8 * (200.0 + 10.0) + (20.0 if stoppable else 170.0)
    assert late.first_start_s - late.job.submit_s > 2 * waited_s
    assert gang.num_moves == 0, "once in, it is left alone"
    assert kept_s
    assert gang.first_start_s - min(kept_s) < 170.0
    assert mean_jct_s(outcome) < 1.5 * mean_jct_s(without)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pause_s", [0.0, 260.0])
def test_odd_lengths_equal_arrivals_and_uneven_nodes_end_under_every_policy(name: str, pause_s: float):
    """Jobs of a billionth of a second and of three centuries, six at one instant, on nodes of 1, 3 and 8 devices. (Who
    works in rounds is spared the centuries.)"""
    cluster = Cluster((Node("n0", 1, "H100"), Node("n1", 8, "H100"), Node("n2", 3, "H100")))
    huge = 1e4 if load(name).round_s else 1e10
    seconds = [1e-9, 1.0, huge, 60.0, 1e-3, 3600.0, 60.0, 60.0, huge / 10, 5.0]
    jobs = [
        sim_job(f"j{i}", 0.0 if i < 6 else 50.0, length, priority=i % 2 - 1, weight=10.0 ** (3 * i - 15))
        for i, length in enumerate(seconds)
    ]
    outcome = Engine(replace(world(*jobs, pause_s=pause_s), cluster=cluster), load(name)).run()
    assert all(record.end_s is not None for record in outcome.records)
    assert all(np.isfinite(value) for value in numbers(world(*jobs), outcome).values())


def test_two_big_gangs_take_turns_once():
    """Both are late all the time: the second waits for the first's end, neither puts the other out."""
    gangs = [
        sim_job(f"g{i}", 0.0, 400.0, curve(1.0, 16.0, sizes=(16,)), min_devices=16, max_devices=16) for i in range(3)
    ]
    outcome = simulate(world(*gangs), reserve=0.01)
    assert all(record.num_moves == 0 for record in outcome.records)
    assert max(record.end_s for record in outcome.records) == pytest.approx(3 * 410.0, abs=1.0)


def test_flat_cost_zero_equals_the_lower_bound_for_one_job():
    where = world(sim_job("a", 0.0, 800.0, curve()), pause_s=0.0)
    outcome = simulate(where)
    assert mean_jct_s(outcome) == pytest.approx(lower_bound_avg_jct_s(where), abs=0.1)


def test_a_straggler_slows_its_job_while_it_lasts():
    """10 s of launch, 40 s at rate 2^0.8, 100 s at half of it, the rest as before."""
    slowdowns = (Slowdown(50.0, "n0", 100.0, 2.0, index=1),)
    where = replace(world(sim_job("a", 0.0, 500.0, min_devices=2), cluster="1x2:H100"), slowdowns=slowdowns)
    seen: list[Snapshot] = []
    script = Script({0.0: {"a": devices(2)}})
    (record,) = Engine(where, script, on_cycle=lambda result: seen.append(result.snapshot)).run().records
    rate, launch_s = 2**0.8, 10.0 + decision_s(2, 1)
    assert record.end_s == pytest.approx(150.0 + (500.0 - rate * (50.0 - launch_s) - rate / 2 * 100.0) / rate)
    during = next(s for s in seen if 60 < s.now_s < 140)
    assert during.slow == {Device("n0", 1): 2.0}
    assert during.jobs[0].observed_step_s == pytest.approx(2 / rate)
    assert not next(s for s in seen if s.now_s > 151).slow


def test_a_slow_device_is_known_only_once_somebody_ran_on_it():
    slowdowns = (Slowdown(1.0, "n0", 1e4, 4.0), Slowdown(1.0, "n1", 5.0, 1.2))
    where = replace(world(sim_job("a", 0.0, 100.0)), slowdowns=slowdowns)
    seen: list[Snapshot] = []
    script = Script({2.0: {"a": devices(1)}})
    Engine(where, script, on_cycle=lambda result: seen.append(result.snapshot)).run()
    assert not next(s for s in seen if s.now_s > 5).slow  # still coming up
    assert next(s for s in seen if s.now_s > 15).slow == {Device("n0", 0): 4.0}


def test_suika_moves_away_from_a_straggler_and_ends_sooner():
    """Eight devices of a node, one of them four times slower for hours; the other node is free."""
    known = curve(1.0, sizes=(8,))
    lone = sim_job("a", 0.0, 40000.0, known, min_devices=8, max_devices=8, requested_devices=8)
    sound = simulate(world(lone)).records[0]
    lame = replace(world(lone), slowdowns=tuple(Slowdown(100.0, f"n{n}", 1e5, 4.0, index=3) for n in (0,)))
    record = simulate(lame).records[0]
    assert record.num_moves == 1
    assert record.end_s == pytest.approx(sound.end_s + 10.0, abs=0.1)  # a move more, nothing else
    nowhere = replace(lame, slowdowns=tuple(Slowdown(100.0, f"n{n}", 1e5, 4.0, index=3) for n in (0, 1)))
    stuck = simulate(nowhere).records[0]
    assert stuck.end_s > 3 * record.end_s
    assert stuck.num_moves <= 2


def test_a_device_fails_alone():
    where = replace(
        world(sim_job("a", 0.0, 1000.0), sim_job("b", 0.0, 1000.0)), failures=(Failure(100.0, "n0", 50.0, index=1),)
    )
    script = Script({0.0: {"a": devices(1), "b": devices(1, first=1)}, 200.0: {"b": devices(1, first=1)}})
    a, b = Engine(where, script).run().records
    assert (a.lost_steps, a.num_moves) == (0.0, 0)
    assert b.lost_steps > 0
    assert b.num_moves == 1


def mixed_curve() -> ScalingCurve:
    """On A100 nodes a step takes three times as long as on H100 nodes, in the same shapes and layouts."""
    options = [
        Option((num,), Layout(dp=num), (3.0 if kind == "A100" else 1.0) / num**0.8, kind)
        for kind in ("A100", "H100")
        for num in (1, 2, 4, 8)
    ]
    return ScalingCurve(tuple(options))


def test_a_job_runs_at_the_pace_of_the_devices_that_it_is_on():
    """The same shape and layout on two types: 100 steps take 100 s on one, 300 s on the other."""
    cluster = Cluster((Node("n0", 8, "H100"), Node("n1", 8, "A100")))
    jobs = [sim_job(name, 0.0, 100.0, mixed_curve()) for name in "ab"]
    where = replace(world(*jobs), cluster=cluster)
    a, b = Engine(where, Script({0.0: {"a": devices(1), "b": devices(1, node=1)}})).run().records
    launch_s = 10.0 + decision_s(16, 2)
    assert a.end_s == pytest.approx(launch_s + 100.0)
    assert b.end_s == pytest.approx(launch_s + 300.0)


@pytest.mark.parametrize("policy", ["suika", "gavel", "fifo"])
def test_both_types_of_devices_are_used_and_no_job_spans_them(policy: str):
    """The engine asserts that no gang stands on two types."""
    cluster = Cluster((Node("n0", 8, "H100"), Node("n1", 8, "A100")))
    jobs = [replace(job, curve=mixed_curve(), max_devices=8) for job in random_jobs(4, num=12, load=2.0)]
    used: set[str] = set()

    def note(result: CycleResult) -> None:
        used.update(device.node for decision in result.decisions for device in decision.devices)

    Engine(replace(world(*jobs), cluster=cluster), load(policy), on_cycle=note).run()
    assert used == {"n0", "n1"}


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["suika", "srtf"]))
def test_guarantees_hold_at_every_cycle_and_nobody_starves(seed: int, policy: str):
    """Moves take time here: an owner without its due while others borrow has to wait for a move only."""
    quotas = {"red": Quota(guarantee=8, max=12), "blue": Quota(guarantee=8)}
    known = curve(0.8, sizes=tuple(range(1, 9)))
    jobs = [
        replace(job, curve=known, min_devices=1, max_devices=8, requested_devices=1, num_steps=min(job.num_steps, 2e3))
        for job in random_jobs(seed, num=14, load=2.0)
    ]

    def check(result: CycleResult) -> None:
        state, gets = result.snapshot, {d.job_id: len(d.devices) for d in result.decisions}
        held = dict.fromkeys(quotas, 0)
        for view in state.jobs:
            held[view.tenant] += gets.get(view.id, len(view.devices))
        assert held["red"] <= 12
        if result.unfinished or state.promised or any(view.locked_at(state.now_s) for view in state.jobs):
            return
        for view in state.jobs:
            waits = not gets.get(view.id, len(view.devices))
            other = next(tenant for tenant in quotas if tenant != view.tenant)
            if waits and held[view.tenant] < 8:
                assert held[other] <= 8, f"{view.id} waits while {other} borrows"

    outcome = Engine(world(*jobs, quotas=quotas), load(policy), on_cycle=check).run()
    assert all(record.end_s is not None for record in outcome.records)


def test_with_two_types_suika_beats_gavel():
    """Gavel was made for unlike devices: a rival for sanity, on the same choice of types."""
    cluster = Cluster((*(Node(f"h{i}", 8, "H100") for i in range(2)), *(Node(f"a{i}", 8, "A100") for i in range(2))))
    jobs = [replace(job, curve=mixed_curve(), max_devices=8) for job in random_jobs(0, num=25, load=3.0)]
    where = replace(world(*jobs, pause_s=20.0), cluster=cluster)
    assert mean_jct_s(simulate(where)) < mean_jct_s(simulate(where, "gavel"))
