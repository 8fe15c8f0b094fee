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
FEW = 64  # devices left below which who can still use them is looked at one by one
NEVER_FITS = np.iinfo(np.int64).max


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
    runs = had.devices > 0
    open_ = alive & ~pinned
    order, behind = _in_order(books, remaining, runs, open_)
    price = (prices.tax / pool) * (behind + prices.kappa)  # [B, J], per device

    cost = _costs(books, remaining, price)  # [K, B, J]
    with np.errstate(divide="ignore", invalid="ignore"):
        keep_cost = np.where(runs, remaining / had.rate * (1 + price * had.devices), np.inf)
    num_columns = len(cost)
    column = cost.reshape(num_columns, -1).argmin(axis=0).reshape(remaining.shape)
    column[keep_cost <= cost.min(axis=0)] = KEPT

    hand = _HandOut(books, order, open_, runs, had.devices, cost, keep_cost, column)
    free = pool - (had.devices * pinned).sum(axis=1)
    hand.give(free)
    if free.any():
        _leftovers(books, remaining, had, hand.column, free)
    return _share(books, had, hand.column, open_, runs, pinned)


def _in_order(
    books: Books, remaining: np.ndarray, runs: np.ndarray, open_: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Jobs of each variant in the order in which they choose [B, J], and how many come behind each job [B, J]."""
    rows, jobs = remaining.shape
    key = remaining / books.reference_rate
    key += np.where(runs, 0.0, books.pause_s)
    if books.weighted:
        key /= books.weight
    if books.tiered:
        key += books.tier * TIER
    key[~open_] = np.inf
    order = key.argsort(axis=1, kind="stable")
    behind = np.empty(rows * jobs)
    place = open_.sum(axis=1, keepdims=True) - 1 - np.arange(jobs)
    behind[(order + np.arange(0, rows * jobs, jobs)[:, None]).ravel()] = place.ravel()
    return order, behind.reshape(rows, jobs)


def _costs(books: Books, remaining: np.ndarray, price: np.ndarray) -> np.ndarray:
    """What each hull point costs each job [K, B, J]: the widest array of a decision, hence built in place."""
    cost = remaining[None] * books.hull_step_s[:, None]
    cost += books.pause_s
    factor = price[None] * books.hull_devices[:, None]
    factor += 1.0
    cost *= factor
    return cost


class _HandOut:
    """Meets wishes in order within what is free; `column` [B, J] ends as what each job gets (WAITS: nothing).

    Wishes are met in bulk up to the first that does not fit; that job takes its best option within what is left; and so
    on behind it. A job whose smallest option does not fit any more is out, since the rest only shrinks.
    """

    def __init__(
        self,
        books: Books,
        order: np.ndarray,
        open_: np.ndarray,
        runs: np.ndarray,
        held: np.ndarray,
        cost: np.ndarray,
        keep_cost: np.ndarray,
        column: np.ndarray,
    ) -> None:
        rows, jobs = order.shape
        self.books, self.order, self.held, self.cost, self.keep_cost = books, order, held, cost, keep_cost
        self.column = column
        self.at = order + np.arange(0, rows * jobs, jobs)[:, None]  # flat places of jobs, in order
        want = np.where(
            column == KEPT, held, books.hull_devices.ravel()[np.maximum(column, 0) * jobs + np.arange(jobs)]
        )
        least = np.where(runs, np.minimum(books.smallest, held), books.smallest)
        self.want = want.ravel()[self.at]
        self.least = np.where(open_, least, NEVER_FITS).ravel()[self.at]
        self.gets = np.zeros((rows, jobs), dtype=bool)

    def give(self, free: np.ndarray) -> None:
        """`free` [B] goes down to what nobody could use."""
        rows, jobs = self.order.shape
        place = np.arange(jobs)
        todo, start = np.arange(rows), np.zeros(rows, dtype=np.int64)
        while len(todo):
            left = free[todo]
            may = self.least[todo] <= left[:, None]
            if start.any():
                may &= place >= start[:, None]
            total = np.where(may, self.want[todo], 0).cumsum(axis=1)
            over = total > left[:, None]
            first = over.argmax(axis=1)
            stuck = over[np.arange(len(todo)), first]
            first[~stuck] = jobs
            self.gets[todo] |= may & (place < first[:, None])
            some = first > 0
            free[todo[some]] -= total[some, first[some] - 1]
            todo, start = todo[stuck], first[stuck] + 1
            for row, at in zip(todo.tolist(), (start - 1).tolist(), strict=True):
                free[row] -= self._best_within(row, at, int(free[row]))
            few = free[todo] <= FEW
            for row, at in zip(todo[few].tolist(), start[few].tolist(), strict=True):
                free[row] = self._one_by_one(row, at, int(free[row]))
            todo, start = todo[~few], start[~few]
        column = self.column.ravel()
        column[self.at[~self.gets]] = WAITS
        self.column = column.reshape(rows, jobs)

    def _one_by_one(self, row: int, start: int, free: int) -> int:
        """Serve whoever still fits from place `start` on; what is left."""
        least = self.least[row, start:]
        for at in (np.flatnonzero(least <= free) + start).tolist() if free else ():
            if self.least[row, at] <= free:
                wanted = int(self.want[row, at])
                if wanted <= free:
                    self.gets[row, at] = True
                    free -= wanted
                else:
                    free -= self._best_within(row, at, free)
                if not free:
                    break
        return free

    def _best_within(self, row: int, at: int, free: int) -> int:
        """The job at this place takes its best option of at most `free` devices; how many that are."""
        job = int(self.order[row, at])
        best, takes, value = WAITS, 0, np.inf
        devices, costs = self.books.hull_devices[:, job].tolist(), self.cost[:, row, job].tolist()
        for column, (num, cost) in enumerate(zip(devices, costs, strict=True)):
            if num <= free and cost < value:
                best, takes, value = column, num, cost
        held = int(self.held[row, job])
        if 0 < held <= free and self.keep_cost[row, job] <= value:
            best, takes = KEPT, held
        self.column[row, job] = best
        self.gets[row, at] = best != WAITS
        return takes


def _share(
    books: Books, had: Share, column: np.ndarray, open_: np.ndarray, runs: np.ndarray, pinned: np.ndarray
) -> Share:
    jobs = column.shape[1]
    chosen = np.maximum(column, 0) * jobs + np.arange(jobs)
    takes = column >= 0
    keeps = (column == KEPT) | pinned
    devices = np.where(takes, books.hull_devices.ravel()[chosen], 0)
    rate = np.where(takes, 1.0 / books.hull_step_s.ravel()[chosen], 0.0)
    devices[keeps] = had.devices[keeps]
    rate[keeps] = had.rate[keeps]
    changed = open_ & (takes | (runs & ~keeps))
    return Share(devices, rate, changed)


def _leftovers(books: Books, remaining: np.ndarray, had: Share, column: np.ndarray, free: np.ndarray) -> None:
    """Spend `free` [B] on steps up the hull, most time saved per device first; rewrites `column` and `free`."""
    for row in np.flatnonzero(free).tolist():
        jobs = np.flatnonzero(column[row] > WAITS)
        gain, step = _next_step(books, remaining[row], had, column[row], row, jobs)
        while True:
            gain[step > free[row]] = -np.inf
            best = int(gain.argmax()) if len(gain) else 0
            if not len(gain) or gain[best] <= 0:
                break
            free[row] -= step[best]
            one = jobs[best : best + 1]
            now = column[row, one[0]]
            held = had.devices[row, one[0]] if now == KEPT else books.hull_devices[now, one[0]]
            column[row, one[0]] = int((books.hull_devices[:, one[0]] <= held).sum())
            gain[best : best + 1], step[best : best + 1] = _next_step(books, remaining[row], had, column[row], row, one)


def _next_step(
    books: Books, remaining: np.ndarray, had: Share, column: np.ndarray, row: int, jobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds saved per device by the next hull point of each of `jobs`, -inf without one, and its devices."""
    width = len(books.hull_devices)
    kept = column[jobs] == KEPT
    at = np.maximum(column[jobs], 0)
    held = np.where(kept, had.devices[row, jobs], books.hull_devices[at, jobs])
    with np.errstate(divide="ignore"):
        step_s = np.where(kept, 1.0 / had.rate[row, jobs], books.hull_step_s[at, jobs])
    upper = np.where(kept, (books.hull_devices[:, jobs] <= held).sum(axis=0), at + 1)
    exists = upper < width
    upper = np.minimum(upper, width - 1)
    more = books.hull_devices[upper, jobs] - held
    saved_s = remaining[jobs] * (step_s - books.hull_step_s[upper, jobs])
    # A change of a job that would run on undisturbed must repay its pause twice.
    repays = np.where(kept, saved_s > 2 * books.pause_s[jobs], saved_s > 0)
    return np.where(exists & repays & (more > 0), saved_s / np.maximum(more, 1), -np.inf), more
