"""Derived state: an incremental board, and the numbers from it, equal those made from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import Flat, job, on, random_snapshot, snapshot

from suika.core.cluster import Device
from suika.core.snapshot import Snapshot
from suika.schedule import books
from suika.schedule.board import Board, board_of
from suika.schedule.books import Books
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load


def next_snapshot(state: Snapshot, rng: np.random.Generator) -> Snapshot:
    """A job ends, arrives, or is given or loses devices; a node drains, devices go down or come back."""
    views = list(state.jobs)
    kind = rng.integers(6)
    if kind == 0 and views:
        views.pop(int(rng.integers(len(views))))
    elif kind == 1:
        views.append(job(f"n{rng.integers(10**9)}", submitted_s=100.0 + len(views)))
    elif kind == 2 and views:
        i = int(rng.integers(len(views)))
        free = [str(d) for d in state.free]
        views[i] = on(views[i], *free[:2]) if len(free) > 1 and not views[i].devices else replace(views[i], devices=())
    changes = {}
    if kind == 3:
        changes["draining"] = frozenset({f"n{rng.integers(4)}"}) if not state.draining else frozenset()
    elif kind == 4:
        changes["down"] = frozenset(state.free[:2]) if not state.down else frozenset()
    elif kind == 5:
        changes["promised"] = {} if state.promised else dict.fromkeys(state.free[-2:], 200.0)
    ordered = tuple(sorted(views, key=lambda v: (v.submitted_s, v.id)))
    return replace(state, jobs=ordered, now_s=state.now_s + float(rng.exponential(20)), **changes)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_incremental_equals_cold(seed: int):
    rng = np.random.default_rng(seed)
    state = random_snapshot(seed)
    board_of(state)
    for _ in range(12):
        state = next_snapshot(state, rng)
        warm, cold = board_of(state), Board(state)
        assert (warm.holder == cold.holder).all()
        assert all((a == b).all() for a, b in zip(warm.positions, cold.positions, strict=True))
        one, two = Books(warm), Books(cold)
        for name in ("number", "remaining", "rate", "pause_s", "held", "hull_devices", "hull_step_s", "pausing_s"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_an_incremental_decision_equals_the_cold_one(seed: int):
    rng = np.random.default_rng(seed)
    policy, state = load("suika"), random_snapshot(seed)
    for _ in range(4):
        run_cycle(state, policy)
        state = next_snapshot(state, rng)
        warm = run_cycle(state, policy).steps
        # Fresh objects everywhere: nothing that was derived before can be of use.
        fresh = replace(state, cluster=replace(state.cluster), jobs=tuple(replace(view) for view in state.jobs))
        assert run_cycle(fresh, policy).steps == warm


def test_a_view_stays_true_as_time_passes():
    view = replace(on(job("a", 1000.0), "n0/0"), observed_step_s=2.0, as_of_s=100.0)
    assert view.remaining_at(100.0) == 1000.0
    assert view.remaining_at(300.0) == 900.0
    assert replace(view, moving_until_s=200.0).remaining_at(300.0) == 950.0
    assert replace(view, as_of_s=None).remaining_at(300.0) == 1000.0
    books = Books(board_of(snapshot("1x8:cpu", view, now_s=300.0)))
    assert books.remaining[0] == 900.0


def test_draining_nodes_and_down_devices_are_not_for_planning():
    state = snapshot(
        "2x8:cpu", on(job("a"), "n0/0", "n1/0"), draining=frozenset({"n0"}), down=frozenset({Device("n1", 7)})
    )
    board = board_of(state)
    assert board.num_usable == 7
    assert board.free_per_node.tolist() == [0, 6]
    assert board.evicted.tolist() == [True]


def test_other_move_costs_are_not_mixed_up():
    view = job("a")
    one = snapshot("1x8:cpu", view, move_cost=Flat(10.0))
    assert Books(board_of(one)).pause_s.tolist() == [10.0]
    two = replace(one, move_cost=Flat(99.0))
    assert Books(board_of(two)).pause_s.tolist() == [99.0]


def test_a_full_table_of_hulls_gives_way_to_another(monkeypatch: pytest.MonkeyPatch):
    """Curves that are learned anew all the time do not fill the memory; decisions stay the same, old boards good."""
    state = random_snapshot(5)
    old = board_of(state)
    before, expected = Books(old), run_cycle(state, load("suika")).steps
    monkeypatch.setattr(books, "MOST_ROWS", 1)
    fresh = replace(state, jobs=tuple(replace(view) for view in state.jobs))
    assert run_cycle(fresh, load("suika")).steps == expected
    assert board_of(fresh).book_rows[0] is not old.book_rows[0]
    mixed = replace(fresh, jobs=(*fresh.jobs[:3], *(replace(view) for view in fresh.jobs[3:])))
    assert run_cycle(mixed, load("suika")).steps == expected
    assert np.array_equal(Books(old).hull_step_s, before.hull_step_s)
