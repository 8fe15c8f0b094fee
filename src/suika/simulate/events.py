"""What happens of itself in a simulation: one function for each kind of event, which says whether a policy is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from suika.simulate.agenda import (
    ARRIVED,
    END,
    FAILED,
    HEALED,
    RELEASED,
    REPAIRED,
    ROUND,
    SETTLED,
    SLOWED,
)
from suika.simulate.live import NOTHING, LiveJob
from suika.simulate.state import State
from suika.simulate.world import Failure, Slowdown

Version = tuple[int, int]  # of what a job holds: its number, and how often that has changed


def _arrived(state: State, number: int) -> bool:
    state.admit(number)
    return True


def _ended(state: State, version: Version) -> bool:
    live = _current(state, version)
    if live is None:
        return False
    live.touch(state.now_s)
    live.break_off(state.now_s)  # a move that had not begun
    due = live.job.num_steps
    assert abs(live.done - due) <= 1e-6 * max(due, 1.0), f"{live.job.id}: {live.done} of {due} steps"
    state.dismiss(live)
    return True


def _settled(state: State, version: Version) -> bool:
    """A move, or the time for which a job is left alone after one that failed, is over."""
    live = _current(state, version)
    if live is None:
        return False
    live.touch(state.now_s)
    state.refresh(live)
    # Where moves may be interrupted, its end makes nothing possible that was not before: nobody is asked.
    return not state.world.interruptible or live.left_alone_until_s == state.now_s


def _current(state: State, version: Version) -> LiveJob | None:
    """The job that an event is about, unless what it holds has changed since."""
    number, changes = version
    live = state.live.get(number)
    return live if live is not None and live.version == changes else None


def _released(state: State, positions: np.ndarray) -> bool:
    state.devices.released(positions, state.now_s)
    return True


def _failed(state: State, failure: Failure) -> bool:
    here = state.devices.under(failure)
    for number in state.devices.jobs_on(here):
        _lose(state, state.live[number])
    state.devices.fail(here)
    state.agenda.enter(state.now_s + failure.down_s, REPAIRED, failure)
    return True


def _lose(state: State, live: LiveJob) -> None:
    """A node under it is gone: it falls back to its last snapshot and waits for devices."""
    live.touch(state.now_s)
    live.break_off(state.now_s)
    running_s = max(state.now_s - live.moving_until_s, 0.0) if live.rate else 0.0
    lost = min(running_s % state.world.snapshot_every_s * live.rate, live.done)
    live.done -= lost
    live.record.lost_steps += lost
    state.hold(live, NOTHING)
    live.stand_still(state.now_s)
    live.left_alone_until_s = state.now_s
    live.layout, live.version = None, live.version + 1
    state.refresh(live)


def _repaired(state: State, failure: Failure) -> bool:
    state.devices.repair(state.devices.under(failure))
    return True


def _slowed(state: State, slowdown: Slowdown) -> bool:
    state.devices.slow_down(slowdown)
    state.agenda.enter(state.now_s + slowdown.for_s, HEALED, slowdown)
    _change_paces(state, slowdown)
    return True


def _healed(state: State, slowdown: Slowdown) -> bool:
    state.devices.heal(slowdown)
    _change_paces(state, slowdown)
    return True


def _change_paces(state: State, slowdown: Slowdown) -> None:
    """Jobs on these devices go on at another pace, and their ends are others."""
    for number in state.devices.jobs_on(state.devices.under(slowdown)):
        live = state.live[number]
        live.touch(state.now_s)
        live.rate, live.version = state.devices.true_rate(live), live.version + 1
        settled_s = max(live.moving_until_s, live.left_alone_until_s)
        if settled_s > state.now_s:
            state.expect_settled(live, settled_s)
        state.expect_end(live)
        state.refresh(live)


def _round(state: State, every_s: float) -> bool:
    """A policy wants to be asked every so often, whatever happens."""
    state.agenda.enter(state.now_s + every_s, ROUND, every_s)
    return True


APPLY: Mapping[int, Callable[..., bool]] = {
    END: _ended,
    SETTLED: _settled,
    RELEASED: _released,
    REPAIRED: _repaired,
    HEALED: _healed,
    FAILED: _failed,
    SLOWED: _slowed,
    ARRIVED: _arrived,
    ROUND: _round,
}
