"""The pause and the loss of a move, by their definitions, on times written by hand."""

from __future__ import annotations

import pytest

from suika.runtime.timing import KEPT, StepTimes, lost_s, pause_s


def test_pause_is_the_gap_beyond_a_step_of_the_new_layout() -> None:
    old = StepTimes([0.0, 1.0, 2.0])
    new = StepTimes([5.0, 5.5, 6.0, 6.5, 9.0])
    assert pause_s(old, new) == pytest.approx(5.0 - 2.0 - 0.5)
    assert pause_s(old, StepTimes([5.0])) is None
    assert pause_s(StepTimes(), new) is None


def test_time_lost_before_the_cut_counts_slow_steps_only() -> None:
    times = StepTimes([0.0, 1.0, 2.0, 3.0, 4.5, 6.0])
    assert lost_s(times, since_s=3.2) == pytest.approx(1.0)
    assert lost_s(StepTimes([0.0, 1.0, 2.0, 2.9]), since_s=2.1) == 0.0
    assert lost_s(StepTimes([0.0]), since_s=0.0) == 0.0


def test_what_is_kept_of_millions_of_steps_is_bounded_and_tells_the_same() -> None:
    times, at_s = StepTimes(), 0.0
    for step in range(20 * KEPT):
        at_s += 0.01 if step < 17 * KEPT else 0.02
        times.ended(step, at_s)
        assert len(times.steps) <= 2 * KEPT
    since_s = 17 * KEPT * 0.01
    assert times.latest_s == pytest.approx(0.02)
    assert (times.steps[0], times.ends_s[0]) == (0, 0.01)
    assert lost_s(times, since_s) == pytest.approx(3 * KEPT * 0.01, rel=0.01), "slow for longer than all is kept"
