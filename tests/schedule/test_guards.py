"""What keeps Suika from moving a job too often, and from letting one wait for ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from schedule_cases import Flat, after, curve, job, on, snapshot

from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.books import Books
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load

ALL = tuple(f"n0/{i}" for i in range(8))


def devices_after(state: Snapshot, **parameters: float) -> dict[str, int]:
    return {view.id: len(view.devices) for view in after(run_cycle(state, load("suika", **parameters))).jobs}


def crowded(**changes: object) -> Snapshot:
    """A long job on all of a node, and a short one that waits for half of it."""
    long = on(job("long", 1e4, curve((4, 8)), min_devices=4, max_devices=8), *ALL)
    short = job("short", 10.0, curve((4,)), min_devices=4, max_devices=4, submitted_s=900.0)
    return snapshot("1x8:cpu", replace(long, **changes), short, now_s=1000.0, move_cost=Flat(100.0))


def test_who_has_moved_too_often_for_its_run_time_is_left_alone():
    assert devices_after(crowded(started_s=0.0, num_moves=4)) == {"long": 4, "short": 4}
    # 7 pauses of 100 s against 1,000 s so far, one pause and what is left at its best rate.
    left_s = Books(board_of(crowded())).remaining[0] / Books(board_of(crowded())).max_rate[0]
    share = 700.0 / (1000.0 + 100.0 + left_s)
    often = crowded(started_s=0.0, num_moves=5)
    assert devices_after(often, moving_share=share * 0.99) == {"long": 8, "short": 0}
    assert devices_after(often, moving_share=share * 1.01) == {"long": 4, "short": 4}
    # Its moves are few for a job that has run long enough.
    assert devices_after(crowded(started_s=-1e6, num_moves=5)) == {"long": 4, "short": 4}


def test_residency_lets_a_job_run_before_it_is_changed_again():
    fresh = crowded(started_s=0.0, last_change_s=850.0)
    assert devices_after(fresh, residency=2.0) == {"long": 8, "short": 0}
    assert devices_after(fresh, residency=1.0) == {"long": 4, "short": 4}


def test_changes_that_do_not_save_enough_are_left():
    assert devices_after(crowded(started_s=0.0), repay=2.0) == {"long": 4, "short": 4}
    assert devices_after(crowded(started_s=0.0), repay=1e3) == {"long": 8, "short": 0}


def test_whoever_must_leave_is_moved_however_often_it_has_been():
    state = snapshot(
        "2x8:cpu",
        on(job("a", 100.0, max_devices=4, started_s=0.0, num_moves=50), "n0/0", "n0/1"),
        draining=frozenset({"n0"}),
        now_s=10.0,
    )
    assert {device.node for device in after(run_cycle(state, load("suika"))).jobs[0].devices} == {"n1"}


def test_weight_grows_with_slowdown_beyond_patience():
    state = snapshot("1x8:cpu", job("a", 100.0, curve((1,)), max_devices=1), now_s=1000.0, move_cost=Flat(0.0))
    board = board_of(state)
    alone_s = 100.0 / Books(board).max_rate[0]
    assert Books(board).weight.tolist() == [1.0]
    np.testing.assert_allclose(Books(board, patience=5.0).weight, [1000.0 / alone_s / 5.0])
    assert Books(board, patience=1e6).weight.tolist() == [1.0]


def test_a_gang_of_the_whole_cluster_does_not_wait_for_ever():
    """It is longer than anyone else, so that by remaining time alone it would never be its turn."""
    gang = job("gang", 3000.0, curve((8,)), min_devices=8, max_devices=8)
    small = [
        on(
            job(f"s{i}", 500.0, curve((2,)), min_devices=2, max_devices=2, submitted_s=1e7 - 100),
            *ALL[2 * i : 2 * i + 2],
        )
        for i in range(4)
    ]
    late = snapshot("1x8:cpu", gang, *small, now_s=1e7, move_cost=Flat(1.0))
    assert devices_after(late, patience=1e9, reserve=1e9)["gang"] == 0
    assert devices_after(late, reserve=1e9)["gang"] == 8
