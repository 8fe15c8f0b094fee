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

from suika.schedule.books import KEPT, NONE, WAITS, Books
from suika.schedule.leftovers import climb, fill

TIER = 1e12  # seconds between tiers in the sort key: more than any job lasts
FEW = 64  # devices left below which who can still use them is looked at one by one
NEVER_FITS = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Prices:
    tax: float = 2.0
    kappa: float = 1.0


@dataclass
class Share:
    """Who has what, per variant [B, J]: devices (0: waits), seconds per step (inf: waits), and whom the last `expand`
    changed."""

    devices: np.ndarray
    step_s: np.ndarray
    changed: np.ndarray


def expand(
    books: Books,
    pool: int,
    prices: Prices,
    remaining: np.ndarray,
    had: Share,
    alive: np.ndarray,
    pinned: np.ndarray | None = None,
    barred: np.ndarray | None = None,
    filling: bool = False,
) -> Share:
    """A new share of `pool` devices. `remaining` (> 0), `alive`, `pinned` are [B, J]; pinned jobs stay. `barred`
    [K, J]: hull points that may not be taken now (a job may keep what it has). `filling`: what is left in the end goes
    to sizes between hull points."""
    runs = had.devices > 0
    if barred is not None:
        alive = alive & (runs | (~barred & (books.hull_devices < NONE)).any(axis=0))
    open_ = alive if pinned is None else alive & ~pinned
    order, at, price = _in_order(books, pool, prices, remaining, runs, open_)
    cost = _costs(books, remaining, price)  # [K, B, J]
    if barred is not None:
        np.putmask(cost, np.broadcast_to(barred[:, None], cost.shape), np.inf)
    keep_cost = remaining * had.step_s
    keep_cost *= 1 + price * had.devices
    column = cost.reshape(len(cost), -1).argmin(axis=0).reshape(remaining.shape)
    column[keep_cost <= cost.min(axis=0)] = KEPT

    free = np.full(len(remaining), pool) if pinned is None else pool - (had.devices * pinned).sum(axis=1)
    hand = _HandOut(books, order, at, open_, runs, had.devices, cost, keep_cost, column)
    hand.give(free)
    if free.any():
        climb(books, remaining, had.devices, had.step_s, column, free, barred)
    if filling and barred is None and free.any():
        fill(books, remaining, had.devices, had.step_s, column, free)
    return _share(books, had, column, open_, runs, pinned)


def _in_order(
    books: Books, pool: int, prices: Prices, remaining: np.ndarray, runs: np.ndarray, open_: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Jobs of each variant in the order in which they choose [B, J], their flat places in a [B, J] array, and the price
    of a device for each job [B, J]."""
    rows, jobs = remaining.shape
    key = remaining / books.reference_rate
    key += np.where(runs, 0.0, books.pause_s)
    if books.weighted:
        key /= books.weight
    if books.tiered:
        np.minimum(key, TIER / 2, out=key)
        key += books.tier * TIER
    key[~open_] = np.inf
    order = key.argsort(axis=1, kind="stable")
    behind = np.maximum(open_.sum(axis=1)[:, None] - books.places - 1, 0)  # of no use for who does not choose
    at = order + jobs * np.arange(rows)[:, None]
    price = np.empty(rows * jobs)
    price[at] = (prices.tax / pool) * (behind + prices.kappa)
    return order, at, price.reshape(rows, jobs)


def _costs(books: Books, remaining: np.ndarray, price: np.ndarray) -> np.ndarray:
    """What each hull point costs each job [K, B, J]: the widest array of a decision, hence built in place."""
    cost = remaining * books.hull_step_s[:, None]
    cost += books.pause_s
    factor: np.ndarray = price * books.hull_devices[:, None]
    cost *= np.add(factor, 1.0, out=factor)
    return cost


class _HandOut:
    """Meets wishes in order within what is free; `column` [B, J] is rewritten to what each job gets (WAITS: nothing).

    Wishes are met in bulk up to the first that does not fit; that job takes its best option within what is left; and so
    on behind it. A job whose smallest option does not fit any more is out, since the rest only shrinks.
    """

    def __init__(
        self,
        books: Books,
        order: np.ndarray,
        at: np.ndarray,
        open_: np.ndarray,
        runs: np.ndarray,
        held: np.ndarray,
        cost: np.ndarray,
        keep_cost: np.ndarray,
        column: np.ndarray,
    ) -> None:
        rows, jobs = order.shape
        self.books, self.order, self.held, self.cost, self.keep_cost = books, order, held, cost, keep_cost
        self.at, self.column = at, column
        hull = books.hull_devices.ravel()[np.maximum(column, 0) * jobs + books.places]
        want = np.where(column == KEPT, held, hull)
        least = np.where(runs, np.minimum(books.smallest, held), books.smallest)
        least[~open_] = NEVER_FITS
        self.want, self.least = want.ravel()[self.at], least.ravel()[self.at]
        self.gets = np.zeros((rows, jobs), dtype=bool)

    def give(self, free: np.ndarray) -> None:
        """`free` [B] goes down to what nobody could use."""
        rows, jobs = self.order.shape
        place = self.books.places
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
            if len(todo):
                free[todo] -= self._best_of_each(todo, start - 1, free[todo])
            few = free[todo] <= FEW
            self._one_by_one(todo[few], start[few], free)
            todo, start = todo[~few], start[~few]
        self.column.ravel()[self.at[~self.gets]] = WAITS

    def _best_of_each(self, rows: np.ndarray, at: np.ndarray, free: np.ndarray) -> np.ndarray:
        """`_best_within` of one job in each of `rows`: how many devices each takes."""
        every, jobs = np.arange(len(rows)), self.order[rows, at]
        devices = self.books.hull_devices[:, jobs]
        cost = np.where(devices <= free, self.cost[:, rows, jobs], np.inf)
        best = cost.argmin(axis=0)
        value = cost[best, every]
        takes = np.where(value < np.inf, devices[best, every], 0)
        best = np.where(value < np.inf, best, WAITS)
        held = self.held[rows, jobs]
        keeps = (held > 0) & (held <= free) & (self.keep_cost[rows, jobs] <= value)
        best[keeps], takes[keeps] = KEPT, held[keeps]
        self.column[rows, jobs] = best
        self.gets[rows, at] = best != WAITS
        return takes

    def _one_by_one(self, rows: np.ndarray, start: np.ndarray, free: np.ndarray) -> None:
        """Serve whoever still fits in `rows`, each from its place `start` on; `free` [B] goes down."""
        fits = self.least[rows] <= free[rows, None]
        fits &= self.books.places >= start[:, None]
        which, places = fits.nonzero()
        for row, at in zip(rows[which].tolist(), places.tolist(), strict=True):
            left = free[row]
            if self.least[row, at] <= left:
                wanted = self.want[row, at]
                if wanted <= left:
                    self.gets[row, at] = True
                    free[row] = left - wanted
                else:
                    free[row] -= self._best_within(row, at, int(left))

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
    books: Books, had: Share, column: np.ndarray, open_: np.ndarray, runs: np.ndarray, pinned: np.ndarray | None
) -> Share:
    chosen = np.maximum(column, 0) * column.shape[1] + books.places
    takes, keeps = column >= 0, column == KEPT
    if pinned is not None:
        keeps |= pinned
    devices = np.where(keeps, had.devices, books.size_devices.ravel()[chosen])
    step_s = np.where(keeps, had.step_s, books.size_step_s.ravel()[chosen])
    waits = ~(takes | keeps)
    devices[waits], step_s[waits] = 0, np.inf
    changed = runs & waits
    changed |= takes
    changed &= open_
    return Share(devices, step_s, changed)
