"""Reservations: a gang of more than half of the devices gets in, others use what would stand idle until then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedule_cases import Flat, after, curve, job, on, snapshot

from suika.core.snapshot import JobView, Option, ScalingCurve, Snapshot
from suika.schedule.board import Board
from suika.schedule.books import Books
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load
from suika.schedule.reserve import reservation

ALONE_S = 100.0 + 10.0  # of the gang: its run and its launch


def gang(num: int, slowdown: float, now_s: float = 5000.0, **changes: object) -> JobView:
    """A job of exactly `num` devices that has waited `slowdown` times its time alone."""
    known = ScalingCurve(tuple(replace(o, step_s=1.0) for o in curve((num,)).options))
    submitted_s = now_s - slowdown * ALONE_S
    return job("gang", 100.0, known, min_devices=num, max_devices=num, submitted_s=submitted_s, **changes)


def small(name: str, num: int, seconds: float) -> JobView:
    known = ScalingCurve(tuple(replace(o, step_s=1.0) for o in curve((num,)).options))
    return job(name, seconds, known, min_devices=num, max_devices=num, submitted_s=4990.0)


def devices(first: int, num: int, node: int = 0) -> tuple[str, ...]:
    return tuple(f"n{node}/{i}" for i in range(first, first + num))


def held_after(state: Snapshot, **parameters: float) -> dict[str, int]:
    return {view.id: len(view.devices) for view in after(run_cycle(state, load("suika", **parameters))).jobs}


def at(*jobs: JobView, cluster: str = "1x8:cpu") -> Snapshot:
    return snapshot(cluster, *jobs, now_s=5000.0, move_cost=Flat(10.0))


RUNS = replace(on(small("runs", 4, 300.0), *devices(0, 4)), stoppable=False)


def test_who_ends_before_the_gang_can_start_runs_in_front_of_it():
    """4 of 8 devices come free in 300 s: a job of 200 s starts meanwhile, one of 400 s does not."""
    state = at(RUNS, gang(8, 5.0), small("quick", 2, 200.0), small("slow", 2, 400.0))
    assert held_after(state) == {"runs": 4, "gang": 0, "quick": 2, "slow": 0}
    waits = run_cycle(state, load("suika")).waits
    assert str(waits["slow"].code) == "reserved"
    assert str(waits["gang"].code) == "no-free-devices"
    assert held_after(state, reserve=1e9)["slow"] == 2, "without a reservation it would start"


def test_what_the_gang_leaves_over_is_anybodys():
    """A gang of 6 of 8 leaves 2: there a job may run for ever."""
    runs = replace(on(small("runs", 2, 300.0), *devices(0, 2)), stoppable=False)
    other = replace(on(small("other", 2, 300.0), *devices(2, 2)), stoppable=False)
    state = at(runs, other, gang(6, 5.0), small("slow", 2, 1e6), small("second", 2, 2e6))
    assert held_after(state) == {"runs": 2, "other": 2, "gang": 0, "slow": 2, "second": 0}


def test_nobody_has_a_reservation_before_its_time_or_for_half_of_the_devices():
    for waiting in (gang(8, 3.0), gang(4, 5.0)):
        board = Board(at(RUNS, waiting))
        books = Books(board)
        assert reservation(books, 4.0, books.held < 0) is None
    books = Books(Board(at(RUNS, gang(5, 5.0))))
    found = reservation(books, 4.0, books.held < 0)
    assert found is not None
    assert not found.due


def test_a_gang_that_is_due_starts_whoever_has_to_make_room():
    busy = [on(small(f"b{i}", 2, 20.0), *devices(2 * i, 2)) for i in range(4)]
    assert held_after(at(*busy, gang(8, 7.0)))["gang"] == 0
    late = held_after(at(*busy, gang(8, 8.5)))
    assert late == {"b0": 0, "b1": 0, "b2": 0, "b3": 0, "gang": 8}


def test_a_gang_that_came_in_late_is_left_alone_but_by_a_higher_tier():
    running = on(gang(8, 9.0), *devices(0, 8))
    short = small("short", 2, 1.0)
    assert held_after(at(running, short)) == {"gang": 8, "short": 0}
    assert held_after(at(running, replace(short, priority=1))) == {"gang": 0, "short": 2}
    assert held_after(at(on(gang(8, 2.0), *devices(0, 8)), short))["short"] == 2


def test_who_may_not_be_stopped_holds_a_due_gang_up_and_nobody_is_stopped_for_nothing():
    """Its devices stay reserved: who would outlast the firm job does not start, who ends before it does."""
    soft = on(small("soft", 2, 250.0), *devices(4, 2))
    state = at(RUNS, soft, gang(8, 9.0), small("quick", 2, 200.0), small("slow", 2, 400.0))
    assert held_after(state) == {"runs": 4, "soft": 2, "gang": 0, "quick": 2, "slow": 0}


def test_devices_that_are_away_make_no_reservation():
    state = replace(at(RUNS, gang(8, 9.0), small("slow", 2, 400.0)), down=frozenset())
    away = replace(state, down=frozenset(RUNS.devices[:0]) | frozenset(d for d in state.cluster.devices[7:]))
    assert held_after(away)["slow"] == 2


@pytest.mark.parametrize("slowdown", [5.0, 9.0])
def test_an_elastic_gang_takes_a_size_of_its_range(slowdown: float):
    wide = ScalingCurve(
        tuple(Option((8,) * k, curve((8 * k,)).options[0].layout, 1.0 / k**0.5, "") for k in (1, 2, 3, 4))
    )
    view = job("gang", 100.0, wide, min_devices=24, max_devices=32, submitted_s=5000.0 - slowdown * 70.0)
    assert held_after(at(view, cluster="4x8:cpu"))["gang"] in (24, 32)
