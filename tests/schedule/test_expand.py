"""EXPAND and DRAIN against plain-Python readings of their rules, one job after the other."""

from __future__ import annotations

import warnings

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import Flat, curve, job, on, random_snapshot, snapshot

from suika.schedule.board import board_of
from suika.schedule.books import NONE, Books
from suika.schedule.cycle import run_cycle
from suika.schedule.drain import drain
from suika.schedule.expand import TIER, Prices, Share, expand
from suika.schedule.policies import load


def plain_expand(
    books: Books, pool: int, prices: Prices, pins: np.ndarray, barred: np.ndarray | None = None
) -> list[int]:
    """Devices per job, by the rule as it is written; `barred` [K, J] points may not be taken."""
    num = len(books)
    hulls = [
        [(int(d), float(s)) for d, s in zip(books.hull_devices[:, j], books.hull_step_s[:, j], strict=True) if d < NONE]
        for j in range(num)
    ]
    open_ = [{d for k, (d, _) in enumerate(hull) if barred is None or not barred[k, j]} for j, hull in enumerate(hulls)]
    held, rate = books.held.tolist(), books.rate.tolist()
    free = pool - sum(held[j] for j in range(num) if pins[j])
    key = [
        (books.remaining[j] / books.reference_rate[j] + (0 if held[j] else books.pause_s[j])) / books.weight[j]
        + books.tier[j] * TIER
        for j in range(num)
    ]
    order = sorted((j for j in range(num) if not pins[j] and (held[j] or open_[j])), key=lambda j: key[j])
    got: dict[int, tuple[int, float, bool]] = {}  # devices, seconds per step, kept
    for place, j in enumerate(order):
        price = prices.tax * (len(order) - 1 - place + prices.kappa) / pool
        left, pause_s = books.remaining[j], books.pause_s[j]
        options = [
            ((left * s + pause_s) * (1 + price * d), 1, d, s, False) for d, s in hulls[j] if d <= free and d in open_[j]
        ]
        if 0 < held[j] <= free:
            options.append((left / rate[j] * (1 + price * held[j]), 0, held[j], 1 / rate[j], True))
        if options:
            _, _, d, s, kept = min(options)
            got[j], free = (d, s, kept), free - d
    while True:
        steps = []
        for j, (d, s, kept) in got.items():
            upper = next(((e, t) for e, t in hulls[j] if e > d), None)
            if upper is not None and upper[0] - d <= free and upper[0] in open_[j]:
                saved_s = books.remaining[j] * (s - upper[1])
                if saved_s > (2 * books.pause_s[j] if kept else 0):
                    steps.append((saved_s / (upper[0] - d), -j, upper))
        if not steps:
            break
        _, minus_j, (e, t) = max(steps)
        free -= e - got[-minus_j][0]
        got[-minus_j] = (e, t, False)
    return [held[j] if pins[j] else got.get(j, (0, 0, False))[0] for j in range(num)]


def stacked(books: Books, pins: np.ndarray, pool: int, prices: Prices, barred: np.ndarray | None = None) -> Share:
    shape = pins.shape
    had = Share(np.broadcast_to(books.held, shape), np.broadcast_to(books.step_s, shape), np.zeros(shape, bool))
    alive = np.ones(shape, bool)
    return expand(books, pool, prices, np.broadcast_to(books.remaining, shape), had, alive, pins, barred)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 2.0, 8.0]), st.integers(1, 6))
def test_expand_is_the_rule(seed: int, tax: float, nodes: int):
    rng = np.random.default_rng(seed)
    books = Books(board_of(random_snapshot(seed, nodes=nodes, num_jobs=int(rng.integers(1, 16)))))
    pool, prices = books.board.num_usable, Prices(tax, float(rng.integers(3)))
    if not len(books) or not pool:
        return
    pins = (rng.random((3, len(books))) < 0.5) & (books.held > 0)
    plans = stacked(books, pins, pool, prices)
    for row in range(3):
        assert plans.devices[row].tolist() == plain_expand(books, pool, prices, pins[row])
    assert (plans.devices.sum(axis=1) <= np.maximum(pool, (books.held * pins).sum(axis=1))).all()
    same = (plans.devices == books.held) & ~plans.changed
    assert (same | plans.changed | pins).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.0, 1.0))
def test_points_that_are_barred_are_not_taken(seed: int, share: float):
    rng = np.random.default_rng(seed)
    books = Books(board_of(random_snapshot(seed, num_jobs=12)))
    pool, prices = books.board.num_usable, Prices()
    if not len(books) or not pool:
        return
    pins = (rng.random((3, len(books))) < 0.4) & (books.held > 0)
    barred = rng.random(books.hull_devices.shape) < share
    plans = stacked(books, pins, pool, prices, barred)
    for row in range(3):
        assert plans.devices[row].tolist() == plain_expand(books, pool, prices, pins[row], barred)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_a_batch_is_its_rows(seed: int):
    """Variants valued together are valued as alone, and padding a batch changes nothing."""
    rng = np.random.default_rng(seed)
    books = Books(board_of(random_snapshot(seed, num_jobs=12)))
    pool, prices = books.board.num_usable, Prices()
    if not len(books) or not pool:
        return
    pins = (rng.random((4, len(books))) < 0.5) & (books.held > 0)
    together = drain(books, pool, prices, stacked(books, pins, pool, prices), completions=16, spread=1.0)
    for row in range(4):
        alone = stacked(books, pins[row : row + 1], pool, prices)
        assert drain(books, pool, prices, alone, completions=16, spread=1.0)[0] == together[row]


def test_a_drain_by_hand():
    """Two jobs on one device: the second starts when the first is done, and pays its start."""
    known = curve((1,))
    first = on(job("first", 100.0, known, max_devices=1), "n0/0")
    second = job("second", 50.0, known, max_devices=1, submitted_s=1.0)
    books = Books(board_of(snapshot("1x1:cpu", first, second, move_cost=Flat(10.0))))
    stay = stacked(books, np.array([[True, False]]), 1, Prices())
    assert stay.devices.tolist() == [[1, 0]]
    # 100 s, then 10 + 50 more: 100 + 160; and the last completion once more for the spread.
    assert drain(books, 1, Prices(), stay, completions=16, spread=0.0)[0] == 260.0
    assert drain(books, 1, Prices(), stay, completions=16, spread=1.0)[0] == 420.0
    # Without completions, all of it is fluid: the shorter work ends first, at 60 s; the other when all work is done.
    assert drain(books, 1, Prices(), stay, completions=0, spread=0.0)[0] == 60.0 + 150.0


def test_every_tier_goes_before_the_next():
    known = curve((1, 2, 4, 8), power=0.99)
    low = job("low", 1.0, known, priority=0, max_devices=8)
    high = job("high", 1e9, known, priority=1, max_devices=8, submitted_s=1.0)
    books = Books(board_of(snapshot("1x8:cpu", low, high)))
    plan = stacked(books, np.zeros((1, 2), bool), 8, Prices(tax=0.0))
    assert plan.devices.tolist() == [[0, 8]]


def test_any_number_of_tiers_and_any_weights_stay_finite():
    """Two thousand priorities: the highest are told apart, the rest counts as one tier in a plan's value."""
    jobs = [job(f"j{i:04}", 100.0, curve((1,)), priority=i - 1000, max_devices=1) for i in range(2001)]
    jobs.append(job("light", 1e9, curve((1,)), weight=1e-300, priority=1000, max_devices=1))
    jobs.append(job("heavy", 1e9, curve((1,)), weight=1e300, priority=999, max_devices=1))
    books = Books(board_of(snapshot("1x1:cpu", *jobs)))
    plan = stacked(books, np.zeros((1, len(books)), bool), 1, Prices())
    value = drain(books, 1, Prices(), plan, completions=4, spread=1.0)
    assert np.isfinite(value).all()
    (gets,) = np.flatnonzero(plan.devices[0])
    assert books.board.jobs[books.number[gets]].id == "j2000"
    sure = {"j2000": 1.0, "j1999": 1e-4, "light": 1e-6}
    names = [books.board.jobs[number].id for number in books.number]
    weight = {name: books.value_weight[names.index(name)] / books.value_weight[names.index("j2000")] for name in sure}
    assert all(abs(weight[name] / sure[name] - 1) < 1e-9 for name in sure)


def test_a_job_of_a_size_that_its_curve_does_not_have_costs_no_warning():
    """It runs on 3, its curve knows 1, 2 and 4: its pace is that on 2 until it is measured."""
    odd = on(job("odd", 100.0, curve((1, 2, 4)), max_devices=8), "n0/0", "n0/1", "n0/2")
    none = on(job("none", 100.0, curve((4,)), max_devices=8, submitted_s=1.0), "n0/3")
    assert odd.step_s == curve((2,)).options[0].step_s
    assert none.step_s is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_cycle(snapshot("1x8:cpu", odd, none, job("new", 10.0, submitted_s=5.0)), load("suika"))
    assert not result.rejected
