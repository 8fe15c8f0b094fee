"""The controller's clock over steps of the machine's."""

from __future__ import annotations

import time

import pytest

from suika.control.clock import SteadyClock


def test_it_follows_steps_forward_and_never_goes_back() -> None:
    wall, steady = [1000.0], [5.0]
    clock = SteadyClock(lambda: wall[0], lambda: steady[0])

    def pass_s(seconds: float, step_s: float = 0.0) -> float:
        steady[0] += seconds
        wall[0] += seconds + step_s
        return clock()

    assert pass_s(10.0) == 1010.0
    assert pass_s(1.0, step_s=3600.0) == 4611.0
    assert pass_s(0.0, step_s=-3600.0) == 4611.0
    assert pass_s(100.0) == pytest.approx(4611.0 + 95.0), "slower, until the machine's clock is there"
    seen = [pass_s(100.0) for _ in range(1000)]
    assert seen == sorted(seen)
    assert seen[-1] == wall[0]


def test_it_is_the_machines_time() -> None:
    clock = SteadyClock()
    assert clock() == pytest.approx(time.time(), abs=1.0)
    seen = [clock() for _ in range(1000)]
    assert seen == sorted(seen)
