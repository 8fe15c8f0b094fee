"""DRAIN: what a share of the pool is worth, by letting the queue run dry, for many variants at once.

One pool of devices, no arrivals. Whoever is changed pauses (a job already pausing only for what remains). At each
completion EXPAND shares the pool anew, and its changes pause too. After some completions the rest is valued by fluid
shortest-remaining-first: a job ends when all the work before it is done at its best efficiency on the whole pool, but
not before it could end alone at its best rate.
"""

from __future__ import annotations

import numpy as np

from suika.schedule.books import Books
from suika.schedule.expand import Prices, Share, expand

LEAST = 1e-9  # steps: who has ended, or is about to, still divides


def drain(books: Books, pool: int, prices: Prices, plans: Share, *, completions: int, spread: float) -> np.ndarray:
    """[B] predicted sum of weighted completion times from now + `spread` x the last one, of each variant in `plans`."""
    rows, num_jobs = plans.devices.shape
    share = Share(plans.devices.copy(), plans.step_s.copy(), plans.changed)
    remaining = np.broadcast_to(books.remaining, (rows, num_jobs)).copy()
    # A move in flight holds its job for what remains; a fresh change for the whole pause.
    pause = np.where(plans.changed, books.pause_s, books.pausing_s)
    alive = np.ones((rows, num_jobs), dtype=bool)
    clock, total, last = np.zeros(rows), np.zeros(rows), np.zeros(rows)
    every = np.arange(rows)
    for _ in range(min(completions, num_jobs)):
        end = remaining * share.step_s
        end += pause
        first = end.argmin(axis=1)
        span = end[every, first]
        ends = span < np.inf
        if not ends.all():
            if not ends.any():
                break
            span = np.where(ends, span, 0.0)
        clock += span
        remaining -= np.maximum(span[:, None] - pause, 0.0) / share.step_s
        pause -= span[:, None]
        np.maximum(pause, 0.0, out=pause)
        total += np.where(ends, books.value_weight[first] * clock, 0.0)
        last = np.where(ends, clock, last)
        gone = every[ends], first[ends]
        alive[gone], share.devices[gone], share.step_s[gone] = False, 0, np.inf
        np.maximum(remaining, LEAST, out=remaining)
        share = expand(books, pool, prices, remaining, share, alive)
        pause = np.where(share.changed, books.pause_s, pause)
    rest, rest_last = _fluid(books, pool, remaining, share.devices > 0, alive, clock)
    return total + rest + spread * np.maximum(last, rest_last)


def _fluid(
    books: Books, pool: int, remaining: np.ndarray, runs: np.ndarray, alive: np.ndarray, clock: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Weighted sum [B] and latest [B] of the completion times of whoever is still alive."""
    work = remaining * books.least_work  # device-seconds
    order = np.where(alive, work / books.weight + 1e12 * books.tier, np.inf).argsort(axis=1)
    ahead = np.empty_like(work)
    np.put_along_axis(ahead, order, np.cumsum(np.take_along_axis(work, order, axis=1), axis=1), axis=1)
    alone = remaining / books.max_rate + np.where(runs, 0.0, books.pause_s)
    end = np.where(alive, clock[:, None] + np.maximum(ahead / pool, alone), 0.0)
    return (end * books.value_weight).sum(axis=1), end.max(axis=1, initial=0.0)
