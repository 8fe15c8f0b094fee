"""Several device types: each job on one type at a time, and the cycle chooses which."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from schedule_cases import POLICIES, Flat, after, check_floor, job, on, snapshot

from suika.core.cluster import Cluster, Node
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Option, ScalingCurve, Snapshot
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load

MIXED = Cluster((Node("h0", 8, "H100"), Node("a0", 8, "A100"), Node("a1", 8, "A100")))


def typed(slower: float = 3.0, sizes: tuple[int, ...] = (8,)) -> ScalingCurve:
    """On A100 a step takes `slower` times as long."""
    options = [
        Option((num,), Layout(dp=num), times / num**0.8, kind)
        for kind, times in (("A100", slower), ("H100", 1.0))
        for num in sizes
    ]
    return ScalingCurve(tuple(options))


def gang(name: str, steps: float, known: ScalingCurve, **changes: object) -> JobView:
    base = {"min_devices": 1, "max_devices": 8, "requested_devices": 8} | changes
    return job(name, steps, known, **base)  # type: ignore[arg-type]


def kinds(state: Snapshot) -> dict[str, str]:
    """Device type of each running job; the test of one type per job is in here."""
    found = {}
    for view in state.jobs:
        types = {state.cluster.node_of[device.node].device_type for device in view.devices}
        assert len(types) <= 1, f"{view.id} stands on {types}"
        if types:
            found[view.id] = types.pop()
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_lone_job_gets_the_type_on_which_it_is_fastest(policy: str):
    done = after(run_cycle(snapshot(MIXED, gang("a", 1e4, typed())), load(policy)))
    assert kinds(done) == {"a": "H100"}
    backwards = after(run_cycle(snapshot(MIXED, gang("a", 1e4, typed(0.5))), load(policy)))
    assert kinds(backwards) == {"a": "A100"}


@pytest.mark.parametrize("policy", POLICIES)
def test_who_gains_most_gets_the_fast_type_and_nothing_stays_idle(policy: str):
    """Two of three gangs run where they are three times slower, as long as the fast node is taken."""
    jobs = [gang(f"j{i}", 1e5, typed(), submitted_s=float(i)) for i in range(3)]
    done = after(run_cycle(snapshot(MIXED, *jobs), load(policy)))
    assert sorted(kinds(done).values()) == ["A100", "A100", "H100"]


def test_a_running_job_changes_type_if_that_repays_the_pause_twice():
    slow = on(gang("a", 1e4, typed()), *(f"a0/{i}" for i in range(8)))
    (step,) = run_cycle(snapshot(MIXED, slow), load("suika")).steps
    assert {device.node for device in step.decision.devices} == {"h0"}
    assert str(step.decision.action) == "redeploy"
    # 20 steps left save 7.6 s, less than twice 10 s.
    near_end = replace(slow, remaining_steps=20.0)
    assert not run_cycle(snapshot(MIXED, near_end), load("suika")).steps
    assert not run_cycle(snapshot(MIXED, slow, move_cost=Flat(1e5)), load("suika")).steps


def test_types_that_are_away_are_not_chosen():
    state = snapshot(MIXED, gang("a", 1e4, typed()), draining=frozenset({"h0"}))
    assert kinds(after(run_cycle(state, load("suika")))) == {"a": "A100"}
    only = ScalingCurve(tuple(o for o in typed().options if o.device_type == "H100"))
    waits = run_cycle(snapshot(MIXED, gang("a", 1e4, only), draining=frozenset({"h0"})), load("suika"))
    assert not waits.steps
    assert waits.waits["a"].sentence


@pytest.mark.parametrize("seed", range(6))
def test_random_mixed_clusters_stay_legal_and_decisions_repeatable(seed: int):
    rng = np.random.default_rng(seed)
    state = snapshot(MIXED)
    for event in range(6):
        curve = typed(float(rng.uniform(0.5, 4.0)), (1, 2, 4, 8))
        new = gang(f"j{event}", float(rng.lognormal(8, 2)), curve, submitted_s=float(event))
        kept = tuple(view for view in state.jobs if rng.random() < 0.9)
        state = replace(state, jobs=(*kept, new), now_s=state.now_s + 10.0)
        for name in ("suika", "gavel"):
            result = run_cycle(state, load(name))
            assert not result.rejected
            check_floor(after(result))
            kinds(after(result))
            cold = replace(state, cluster=replace(MIXED), jobs=tuple(replace(view) for view in state.jobs))
            assert run_cycle(cold, load(name)).steps == result.steps
        state = after(result)
