"""Guards of Suika's policy: what a job may not be given now, however good a plan with it would look.

- a move in flight ends first, and some jobs may not be stopped (users' words);
- *residency*: a job runs undisturbed for some pauses after a change;
- *moving budget*: after `free_moves` moves, a job is left alone while one more would take too much of its run time.
  That will be at least what it has had, the next pause and the rest at its best rate, so the bound holds whatever comes
  after. A stop counts as a move, since the job must come up again;
- *reservations* of big gangs (`reserve.py`).

J jobs, K hull points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.schedule.books import Books
from suika.schedule.reserve import Reservation, reservation, undisturbed


@dataclass(frozen=True)
class Limits:
    """See `policies.suika.Policy`."""

    moving_share: float
    free_moves: int
    residency: float
    reserve: float


@dataclass(frozen=True)
class Guards:
    """`stays` [J] keep what they have in every plan; `firm` [J] may change but not stop; `leaves` [J] may not keep what
    they have; `barred` [K, J] hull points that may not be taken (None: all may)."""

    stays: np.ndarray
    firm: np.ndarray
    leaves: np.ndarray
    barred: np.ndarray | None
    reserved: Reservation | None


def guards(books: Books, limits: Limits) -> Guards:
    runs = books.held > 0
    locked = books.locked & runs
    leaves = books.board.evicted[books.number] & ~locked
    kept = runs & ~leaves
    late = undisturbed(books, limits.reserve) & kept
    reserved = reservation(books, limits.reserve, late)
    stays, firm = locked | late, kept & ~books.stoppable
    barred = None if reserved is None else reserved.barred
    if reserved is None or not reserved.due:  # who is due goes before what jobs may spend on moves
        stays |= kept & (_fresh(books, limits) | _spent(books, limits))
    return Guards(stays, firm, leaves, barred, reserved)


def _fresh(books: Books, limits: Limits) -> np.ndarray:
    now_s = books.board.snapshot.now_s
    fresh: np.ndarray = now_s - books.changed_s < limits.residency * books.pause_s
    return fresh


def _spent(books: Books, limits: Limits) -> np.ndarray:
    """[J] mask: one more move would take too much of its run time."""
    least_s = books.board.snapshot.now_s - books.started_s + books.pause_s + books.remaining / books.max_rate
    moving_s = (books.num_moves + 2) * books.pause_s  # its start, its moves so far and the next one
    spent: np.ndarray = (books.num_moves >= limits.free_moves) & (moving_s > limits.moving_share * least_s)
    return spent
