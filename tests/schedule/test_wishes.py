"""A user's word about a running job: brought about with free devices or its own, whatever the policy; else it waits."""

from __future__ import annotations

import pytest

from suika.core.cluster import Device, parse_cluster_shorthand
from suika.core.decision import Action, ReasonCode
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Move, Option, ScalingCurve, Snapshot
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load

CLUSTER = parse_cluster_shorthand("2x4:cpu")
SIZES = ScalingCurve(tuple(Option((n,), Layout(dp=n, layers_per_stage=(4,)), 1.0 / n, "cpu") for n in range(1, 5)), 1)
MIXED = Layout(tp=2, pp=2, layers_per_stage=(2, 2))


class Cheap:
    def __call__(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> Move:
        return Move(0.1, 0.1)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return 0.1


def running(name: str, num: int, node: str = "n0", first: int = 0, **changes) -> JobView:
    devices = tuple(Device(node, first + i) for i in range(num))
    layout = Layout(dp=num, layers_per_stage=(4,))
    base = {
        "curve": SIZES,
        "min_devices": 1,
        "max_devices": num,
        "started_s": 0.0,
        "layout": layout,
        "devices": devices,
    }
    return JobView(name, JobState.RUNNING, 0.0, 50.0, 50.0, **(base | changes))


def fixed(name: str, num: int, **changes) -> JobView:
    only = ScalingCurve((Option((4,), MIXED, 0.3, "cpu"),), 2)
    return running(name, num, curve=only, min_devices=1, max_devices=4, fixed_layout=Layout(tp=2, pp=2), **changes)


@pytest.mark.parametrize("policy", ["suika", "fifo"])
def test_a_fixed_layout_is_honoured_in_place_by_every_policy(policy: str) -> None:
    result = run_cycle(Snapshot(100.0, CLUSTER, (fixed("a", 4),), Cheap()), load(policy))
    (decision,) = result.decisions
    assert (decision.action, decision.layout, decision.reason.code) == (Action.REDEPLOY, MIXED, ReasonCode.USER)
    assert set(decision.devices) == {Device("n0", i) for i in range(4)}


def test_it_grows_into_what_is_free_and_waits_for_what_is_not() -> None:
    alone = run_cycle(Snapshot(100.0, CLUSTER, (fixed("a", 2),), Cheap()), load("suika"))
    assert len(alone.decisions[0].devices) == 4
    others = (running("b", 2, first=2), running("c", 4, node="n1"))
    crowded = run_cycle(Snapshot(100.0, CLUSTER, (fixed("a", 2), *others), Cheap()), load("suika"))
    assert "a" not in [decision.job_id for decision in crowded.decisions]


def test_a_smaller_range_shrinks_and_another_job_starts_at_its_release() -> None:
    big = running("a", 4, max_devices=2)
    full = running("b", 4, node="n1")
    waiting = JobView("w", JobState.QUEUED, 1.0, 10.0, 0.0, SIZES, 2, 2)
    result = run_cycle(Snapshot(100.0, CLUSTER, (big, full, waiting), Cheap()), load("suika"))
    steps = {step.decision.job_id: step for step in result.steps}
    assert len(steps["a"].decision.devices) == 2
    assert steps["w"].decision.action is Action.START
    assert steps["w"].after == ("a",)


def test_a_job_on_the_move_is_left_alone() -> None:
    moving = fixed("a", 4, moving_until_s=101.0)
    assert run_cycle(Snapshot(100.0, CLUSTER, (moving,), Cheap()), load("suika")).decisions == ()
