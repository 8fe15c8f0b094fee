"""Devices that share cores: bounds, meetings of tensor-parallel groups against a simulation, busiest cores by hand."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from suika.core.layout import Layout
from suika.core.presets import preset
from suika.estimate.predict import estimate_layout, setting
from suika.estimate.recipe import BUILT_IN
from suika.estimate.shared_cores import idle_share, imbalance, load_s, shared_cores_s


def simulated_loss(spread: int, groups: int, rounds: int = 4000) -> float:
    """Events, one by one: `groups` groups of one rank per core; each core works off its ranks' turns in order of
    arrival, a group begins its next round when its slowest turn has ended. Idle time over work."""
    rng = np.random.default_rng(5)
    free, worked = [0.0] * spread, 0.0
    ready = [(0.0, group) for group in range(groups)]
    for _ in range(rounds):
        at, group = heapq.heappop(ready)
        ends = []
        for core in range(spread):
            turn = float(rng.exponential())
            worked += turn
            free[core] = max(free[core], at) + turn
            ends.append(free[core])
        heapq.heappush(ready, (max(ends), group))
    return max(free) * spread / worked - 1


def share(tp: int, pp: int, dp: int, cores: int, num_micro: int = 64) -> float:
    return float(idle_share(*(np.array(float(x)) for x in (tp, pp, dp, num_micro, cores))))


@pytest.mark.parametrize(("spread", "groups"), [(2, 2), (2, 4), (2, 8), (4, 2), (4, 4)])
def test_the_loss_of_meetings_is_that_of_a_simulation(spread: int, groups: int) -> None:
    assert share(spread, 1, groups, spread) == pytest.approx(simulated_loss(spread, groups), abs=0.09)


def simulated_pipelines(stages: int, replicas: int, rounds: int = 20_000) -> float:
    """Pipelines whose stage s keeps to core s, each with as many micro-batches in flight as stages. Idle over work."""
    rng = np.random.default_rng(5)
    free, worked = [0.0] * stages, 0.0
    ready = [(0.0, token, 0) for token in range(stages * replicas)]
    for _ in range(rounds):
        at, token, core = heapq.heappop(ready)
        turn = float(rng.exponential())
        worked += turn
        free[core] = max(free[core], at) + turn
        heapq.heappush(ready, (free[core], token, (core + 1) % stages))
    return max(free) * stages / worked - 1


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (2, 4), (4, 2)])
def test_the_loss_of_hops_is_that_of_a_simulation(stages: int, replicas: int) -> None:
    assert share(1, stages, replicas, stages) == pytest.approx(simulated_pipelines(stages, replicas), abs=0.04)


def test_no_meetings_no_hops_or_no_sharing_lose_nothing() -> None:
    assert share(1, 1, 8, 2) == 0
    assert share(2, 1, 1, 2) == 0
    assert share(2, 2, 2, 0) == 0
    assert share(2, 2, 1, 2) > share(2, 2, 2, 2) > share(2, 1, 4, 2) > 0
    assert load_s(*(np.array(x) for x in (3.0, 2.0, 2.0, 2.0, 8.0, 0.0))) == 0


def test_a_step_takes_at_least_the_path_and_the_cores() -> None:
    for path, load in ((1.0, 0.0), (1.0, 5.0), (5.0, 1.0), (1.0, 1.0)):
        step = path + float(shared_cores_s(np.array(path), np.array(load)))
        assert max(path, load) <= step <= 1.1 * max(path, load)


def test_the_busiest_core_by_hand() -> None:
    assert imbalance([1.0, 1.0], 1, 4, 8, 2) == 1.0
    assert imbalance([1.0, 2.0], 1, 4, 8, 2) == pytest.approx(4 / 3)  # every last stage on the second core
    assert imbalance([1.0, 2.0], 2, 2, 8, 2) == 1.0  # tp ranks side by side: both cores hold both stages
    assert imbalance([1.0, 2.0, 1.0], 1, 2, 8, 2) == 1.0  # an odd number of stages alternates
    assert imbalance([1.0], 1, 1, 8, 2) == 1.0


def test_fewer_cores_take_longer_and_none_shared_is_the_path() -> None:
    model, layout = preset("gpt3-125m"), Layout(tp=2, pp=2, dp=2)

    def step_s(cores: int) -> float:
        s = setting(model, "cpu", global_batch=16, sequence_length=128, precision="fp32", recipe=BUILT_IN, cores=cores)
        return estimate_layout(s, layout).step_s

    assert step_s(1) > step_s(2) > step_s(4) > step_s(0)
