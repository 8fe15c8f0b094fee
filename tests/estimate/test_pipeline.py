"""Makespans: the recurrence against an independent event simulation, the closed form against the recurrence."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.estimate.pipeline import closed_form, interleaved, long_makespan, makespan, one_f_one_b


def simulated(forward: list[float], backward: list[float], stages: int, micro: int, hop: float) -> float:
    """1F1B as events in time order: a stage takes its next pass when its input is there."""
    orders = [one_f_one_b(stages, s, micro) for s in range(stages)]
    arrived: set[tuple[str, int, int]] = {("F", 0, i) for i in range(micro)}
    events: list[tuple[float, int, str, int, int]] = []
    busy, at, end = [False] * stages, [0] * stages, 0.0

    def begin(now: float, s: int) -> None:
        if busy[s] or at[s] == len(orders[s]):
            return
        kind, i = orders[s][at[s]]
        if (kind, s, i) in arrived:
            busy[s] = True
            heapq.heappush(events, (now + (forward if kind == "F" else backward)[s], 1, kind, s, i))

    for s in range(stages):
        begin(0.0, s)
    while events:
        now, what, kind, s, i = heapq.heappop(events)
        if what == 0:
            arrived.add((kind, s, i))
        else:
            busy[s], end = False, max(end, now)
            at[s] += 1
            if kind == "F" and s + 1 < stages:
                heapq.heappush(events, (now + hop, 0, "F", s + 1, i))
            elif kind == "F":
                arrived.add(("B", s, i))
            elif s > 0:
                heapq.heappush(events, (now + hop, 0, "B", s - 1, i))
        begin(now, s)
    return end


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 9), st.floats(0, 0.5))
def test_recurrence_is_an_event_simulation(data: st.DataObject, stages: int, micro: int, hop: float) -> None:
    seconds = st.lists(st.floats(0.1, 3), min_size=stages, max_size=stages)
    forward, backward = data.draw(seconds), data.draw(seconds)
    expected = simulated(forward, backward, stages, micro, hop)
    assert makespan(forward, backward, stages, micro, hop) == pytest.approx(expected)


@settings(max_examples=20, deadline=None)
@given(st.data(), st.integers(2, 4), st.integers(1, 2), st.integers(7, 12), st.integers(0, 3))
def test_long_runs_are_extrapolated_well(data: st.DataObject, stages: int, chunks: int, rounds: int, left: int) -> None:
    seconds = st.lists(st.floats(0.5, 2), min_size=stages * chunks, max_size=stages * chunks)
    forward, backward = data.draw(seconds), data.draw(seconds)
    micro = rounds * stages + (left % stages if chunks == 1 else 0)
    exact = makespan(forward, backward, stages, micro)
    assert long_makespan(forward, backward, stages, micro) == pytest.approx(exact, rel=0.02)


def test_equal_stages_have_the_known_bubble() -> None:
    assert makespan([1.0] * 4, [2.0] * 4, 4, 8) == pytest.approx((8 + 3) * 3)
    assert makespan([0.5] * 8, [1.0] * 8, 4, 8) == pytest.approx(8 * 3 + 3 * 3 / 2)  # two chunks a stage: half of it


@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (4, 8), (4, 32), (8, 16)])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("extra", [0.0, 0.4])
def test_closed_form_is_exact_for_heavy_ends(stages: int, micro: int, chunks: int, extra: float) -> None:
    forward, backward = [1.0] * (stages * chunks), [2.0] * (stages * chunks)
    forward[-1] += extra
    backward[-1] += 2 * extra
    exact = makespan(forward, backward, stages, micro)
    stage = 3.0 * chunks
    total = stages * stage + 3 * extra
    closed = closed_form(*map(np.float64, (stage, stage, stage + 3 * extra, total, micro, chunks)))
    assert float(closed) == pytest.approx(exact, rel=0.02)


def test_every_pass_is_in_the_interleaved_order_once() -> None:
    for stage in range(4):
        order = interleaved(4, stage, 8, 3)
        assert len(order) == len(set(order)) == 2 * 8 * 3
