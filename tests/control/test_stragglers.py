"""Stragglers by synthetic samples with real noise, and through the controller to all who show them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from world import World

from suika.control.metrics import Metrics
from suika.control.stragglers import LEAST_SAMPLES, LOOKS, SLOW, Stragglers
from suika.core.cluster import Device, parse_cluster_shorthand
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.core.sample import CollectiveSample, StepSample
from suika.runtime.events import Sampled

DEVICES = parse_cluster_shorthand("2x4:cpu").devices


def step(rank: int, slow: dict[int, float], num_ranks: int, dice: random.Random, noise: float) -> list[StepSample]:
    """One synchronous step of all ranks: each computes, then waits for the slowest in a collective."""
    own = [0.1 * slow.get(r, 1.0) * dice.lognormvariate(0.0, noise) for r in range(num_ranks)]
    whole = max(own) + 0.02
    return [
        StepSample("j", 1, rank, r, whole, {"compute": s, "dp": 0.01}, (CollectiveSample("dp", "x", 8, 2, whole - s),))
        for r, s in enumerate(own)
    ]


def watched(plan: Plan, slow: dict[int, float], num_steps: int, seed: int, noise: float) -> tuple[Stragglers, list]:
    stragglers, dice, changes = Stragglers(), random.Random(seed), []
    samples: dict[int, list[StepSample]] = {}
    for number in range(num_steps):
        for sample in step(number, slow, len(plan.devices), dice, noise):
            samples.setdefault(sample.rank, []).append(sample)
            samples[sample.rank] = samples[sample.rank][-8:]
        changes += stragglers.look(plan, samples, (number + 1) * len(plan.devices))
    return stragglers, changes


def plan_of(layout: Layout) -> Plan:
    return Plan(layout, Placement(DEVICES[: layout.num_ranks]))


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(dp=4), Layout(tp=2, dp=4), Layout(tp=2, pp=2, dp=2)])
@pytest.mark.parametrize("seed", range(5))
def test_the_slow_rank_is_found_and_no_other(layout: Layout, seed: int) -> None:
    stragglers, changes = watched(plan_of(layout), {1: 2.0}, 16, seed, noise=0.15)
    assert set(stragglers.slow) == {DEVICES[1]}
    assert stragglers.slow[DEVICES[1]] == pytest.approx(2.0, rel=0.35)
    assert [device for device, _ in changes] == [DEVICES[1]]


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_noise_alone_is_no_straggler(noise: float) -> None:
    """Sixty runs of forty looks: none raises an alarm, whether steps are steady or a third of them is noise."""
    alarms = [watched(plan_of(Layout(dp=4)), {}, 40, seed, noise)[1] for seed in range(60)]
    assert sum(map(bool, alarms)) == 0


def test_a_few_long_steps_are_no_straggler_and_all_slow_is_none() -> None:
    plan, dice = plan_of(Layout(dp=4)), random.Random(3)
    stragglers, samples = Stragglers(), {}
    for number in range(40):
        slow = {2: 6.0} if number % 4 == 0 else {}
        for sample in step(number, slow, 4, dice, 0.05):
            samples[sample.rank] = [*samples.get(sample.rank, []), sample][-8:]
        assert stragglers.look(plan, samples, (number + 1) * 4) == []
    assert watched(plan, dict.fromkeys(range(4), 3.0), 30, 1, 0.1)[1] == []


def test_it_takes_samples_and_two_looks_and_it_goes_away(world: World) -> None:
    """Through the controller: the event, nodes, describe and the metric; and again when the rank is well."""
    run = world.start("a", "n0/0", "n0/1", "n1/0")
    dice, number = random.Random(5), 0

    def go_on(num_steps: int, slow: dict[int, float]) -> None:
        nonlocal number
        for _ in range(num_steps):
            number += 1
            for sample in step(number, slow, 3, dice, 0.1):
                run.on_event(Sampled(run.job_id, 1, replace(sample, job_id=run.job_id)))
        world.turn()

    go_on(LEAST_SAMPLES, {2: 2.5})
    assert "straggler" not in world.kinds("a")  # one look is not enough
    go_on(LOOKS, {2: 2.5})
    told = [event for event in world.store.events() if event.kind == "straggler"]
    assert [event.data["device"] for event in told] == ["n1/0"]
    assert told[0].data["times"] > SLOW
    row = {device["device"]: device for node in world.api.nodes() for device in node["devices"]}
    assert row["n1/0"]["slow"] == pytest.approx(2.5, rel=0.4)
    assert row["n0/0"]["slow"] is None
    assert [found["device"] for found in world.api.describe("a")["stragglers"]] == ["n1/0"]
    assert "suika_slow_devices 1.0" in Metrics(world.api).text()
    go_on(20, {})
    assert world.kinds("a").count("straggler-gone") == 1
    assert world.api.describe("a")["stragglers"] == []
    assert "suika_slow_devices 0.0" in Metrics(world.api).text()
    assert Device("n1", 0) not in world.controller.state.watch(run.job_id).stragglers.slow
