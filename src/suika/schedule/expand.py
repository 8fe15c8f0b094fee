"""EXPAND: share one pool of devices among jobs by price, for many variants at once.

B variants (rows of a batch), J jobs, K hull points. Jobs are taken by (tier, least remaining time at a reference size);
each takes the option that minimises

    (remaining / rate + [changed] pause) x (1 + tax x (jobs behind + kappa) x devices / pool)

so a device is priced by whom it delays. What is left goes to the hull steps that save the most time per device; a job
that runs on undisturbed grows only if that repays its pause twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.schedule.books import Books

TIER = 1e12  # seconds between tiers in the sort key: more than any job lasts
WAITS, KEPT = -2, -1  # instead of a hull column


@dataclass(frozen=True)
class Prices:
    tax: float = 2.0
    kappa: float = 1.0


@dataclass
class Share:
    """Who has what, per variant [B, J]: devices (0: waits), steps/s, and whom the last `expand` changed."""

    devices: np.ndarray
    rate: np.ndarray
    changed: np.ndarray


def expand(
    books: Books, pool: int, prices: Prices, remaining: np.ndarray, had: Share, alive: np.ndarray, pinned: np.ndarray
) -> Share:
    """A new share of `pool` devices. `remaining`, `alive`, `pinned` are [B, J]; pinned jobs keep what they have."""
    jobs = np.arange(len(books))
    runs = had.devices > 0
    free = pool - (had.devices * pinned).sum(axis=1)
    open_ = alive & ~pinned
    order, behind = _in_order(books, remaining, runs, open_)
    price = prices.tax * (behind + prices.kappa) / pool  # [B, J], per device

    # These are the widest arrays of a decision, hence in place.
    cost = remaining[:, :, None] * books.hull_step_s
    cost += books.pause_s[:, None]
    cost *= 1 + price[:, :, None] * books.hull_devices
    with np.errstate(divide="ignore", invalid="ignore"):
        keep_cost = np.where(runs, remaining / had.rate * (1 + price * had.devices), np.inf)
    column = cost.argmin(axis=2)
    column[keep_cost <= np.take_along_axis(cost, column[:, :, None], axis=2)[:, :, 0]] = KEPT
    want = np.where(column == KEPT, had.devices, books.hull_devices[jobs, column])
    least = np.where(runs, np.minimum(books.smallest, had.devices), books.smallest)

    gets = _hand_out(books, order, open_, want, least, column, cost, keep_cost, had.devices, free)
    column = np.where(gets, column, WAITS)
    _leftovers(books, remaining, had, column, free)
    chosen = np.maximum(column, 0)
    keeps = (column == KEPT) | pinned
    devices = np.where(keeps, had.devices, np.where(column >= 0, books.hull_devices[jobs, chosen], 0))
    rate = np.where(keeps, had.rate, np.where(column >= 0, 1.0 / books.hull_step_s[jobs, chosen], 0.0))
    changed = open_ & ((column >= 0) | ((column == WAITS) & runs))
    return Share(devices, rate, changed)


def _in_order(
    books: Books, remaining: np.ndarray, runs: np.ndarray, open_: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Jobs of each variant in the order in which they choose [B, J], and how many come behind each job [B, J]."""
    key = (remaining / books.reference_rate + np.where(runs, 0.0, books.pause_s)) / books.weight + books.tier * TIER
    order = np.where(open_, key, np.inf).argsort(axis=1, kind="stable")
    behind = np.empty_like(order)
    last = open_.sum(axis=1, keepdims=True) - 1
    np.put_along_axis(behind, order, last - np.arange(order.shape[1]), axis=1)
    return order, behind


def _hand_out(
    books: Books,
    order: np.ndarray,
    open_: np.ndarray,
    want: np.ndarray,
    least: np.ndarray,
    column: np.ndarray,
    cost: np.ndarray,
    keep_cost: np.ndarray,
    held: np.ndarray,
    free: np.ndarray,
) -> np.ndarray:
    """Mask [B, J] of jobs that get something; `column` is rewritten where the wish did not fit, `free` [B] goes down.

    Wishes are met in bulk up to the first that does not fit; that job takes its best option within what is left; and so
    on behind it. A job whose smallest option does not fit any more is out, since the rest only shrinks.
    """
    rows, num_jobs = order.shape
    gets_in_order = np.zeros((rows, num_jobs), dtype=bool)
    want_in_order = np.take_along_axis(want, order, axis=1)
    least_in_order = np.take_along_axis(np.where(open_, least, np.iinfo(np.int64).max), order, axis=1)
    place = np.arange(num_jobs)
    start = np.zeros(rows, dtype=np.int64)
    todo = np.arange(rows)
    while len(todo):
        may = (place >= start[todo, None]) & (least_in_order[todo] <= free[todo, None])
        total = np.cumsum(np.where(may, want_in_order[todo], 0), axis=1)
        over = total > free[todo, None]
        stuck = over.any(axis=1)
        first = np.where(stuck, over.argmax(axis=1), num_jobs)
        gets_in_order[todo] |= may & (place < first[:, None])
        spent = np.where(first > 0, np.take_along_axis(total, np.maximum(first - 1, 0)[:, None], axis=1)[:, 0], 0)
        free[todo] -= spent
        todo, first = todo[stuck], first[stuck]
        start[todo] = first + 1
        if not len(todo):
            break
        job = order[todo, first]
        fits = np.where(books.hull_devices[job] <= free[todo, None], cost[todo, job], np.inf)  # [b, K]
        best = fits.argmin(axis=1)
        value = fits[np.arange(len(todo)), best]
        keep_value = np.where(held[todo, job] <= free[todo], keep_cost[todo, job], np.inf)
        keeps = keep_value <= value
        some = np.minimum(value, keep_value) < np.inf
        column[todo, job] = np.where(keeps, KEPT, best)
        gets_in_order[todo, first] = some
        free[todo] -= np.where(some, np.where(keeps, held[todo, job], books.hull_devices[job, best]), 0)
    gets = np.empty_like(gets_in_order)
    np.put_along_axis(gets, order, gets_in_order, axis=1)
    return gets & open_


def _leftovers(books: Books, remaining: np.ndarray, had: Share, column: np.ndarray, free: np.ndarray) -> None:
    """Spend `free` [B] on steps up the hull, most time saved per device first; rewrites `column` and `free`."""
    todo = np.flatnonzero((free > 0) & (column > WAITS).any(axis=1))
    if not len(todo):
        return
    width = books.hull_devices.shape[1]
    gain = np.full((len(todo), len(books)), -np.inf)
    step = np.zeros((len(todo), len(books)), dtype=np.int64)  # devices more
    for i, row in enumerate(todo.tolist()):
        jobs = np.flatnonzero(column[row] > WAITS)
        gain[i, jobs], step[i, jobs] = _next_step(books, remaining[row], had, column, row, jobs)
    while True:
        gain[step > free[todo, None]] = -np.inf
        job = gain.argmax(axis=1)
        good = gain[np.arange(len(todo)), job] > 0
        if not good.any():
            return
        for i in np.flatnonzero(good).tolist():
            row, one = int(todo[i]), job[i : i + 1]
            free[row] -= step[i, one[0]]
            held = had.devices[row, one] if column[row, one[0]] == KEPT else books.hull_devices[one, column[row, one]]
            column[row, one] = np.minimum((books.hull_devices[one] <= held[:, None]).sum(axis=1), width - 1)
            gain[i, one], step[i, one] = _next_step(books, remaining[row], had, column, row, one)


def _next_step(
    books: Books, remaining: np.ndarray, had: Share, column: np.ndarray, row: int, jobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds saved per device by the next hull point of each of `jobs`, -inf without one, and its devices."""
    width = books.hull_devices.shape[1]
    kept = column[row, jobs] == KEPT
    at = np.maximum(column[row, jobs], 0)
    held = np.where(kept, had.devices[row, jobs], books.hull_devices[jobs, at])
    with np.errstate(divide="ignore"):
        step_s = np.where(kept, 1.0 / had.rate[row, jobs], books.hull_step_s[jobs, at])
    upper = np.where(kept, (books.hull_devices[jobs] <= held[:, None]).sum(axis=1), at + 1)
    exists = upper < width
    upper = np.minimum(upper, width - 1)
    more = books.hull_devices[jobs, upper] - held
    saved_s = remaining[jobs] * (step_s - books.hull_step_s[jobs, upper])
    # A change of a job that would run on undisturbed must repay its pause twice.
    repays = np.where(kept, saved_s - books.pause_s[jobs] > books.pause_s[jobs], saved_s > 0)
    return np.where(exists & repays & (more > 0), saved_s / np.maximum(more, 1), -np.inf), more
