"""Suika: expand, then balance by trying plans out before adopting one.

Candidates are EXPAND with some jobs pinned to what they have: all of them (STAY), none (EXPAND), and the better of the
two with single jobs pinned or released. Each is valued by a short simulated drain of the queue with every later move
charged; the best predicted sum of completion times is stood on the topology.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.books import Books
from suika.schedule.drain import drain
from suika.schedule.expand import Prices, Share, expand
from suika.schedule.realise import KEEP, Target, realise


@dataclass(frozen=True)
class Policy:
    """`tax`, `kappa`: the price of a device (see expand). `spread`: weight of the last completion in a plan's value.
    `margin`: part of its value by which a plan must beat staying put. `longest`: single jobs tried in the balance step.
    `drains`: most plans valued in one decision. `completions`: how far a drain goes before the fluid rest."""

    name: str = "suika"
    tax: float = 2.0
    kappa: float = 1.0
    spread: float = 1.0
    margin: float = 0.0
    longest: int = 6
    drains: int = 60
    completions: int = 16

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        books = Books(board)
        if not len(books) or not board.num_usable:
            return realise(board, [], pinned=board.running)
        search = _Search(self, books)
        plan, pinned = search.best()
        return realise(board, _targets(books, plan), pinned=pinned)


class _Search:
    """One decision's search: a plan is a row of `Share`, made from a row of pins."""

    def __init__(self, policy: Policy, books: Books) -> None:
        self.policy, self.books = policy, books
        self.pool = books.board.num_usable
        self.prices = Prices(policy.tax, policy.kappa)
        self.runs = books.held > 0
        # May not be touched (a move in flight), may not be kept (must leave its devices).
        self.locked = books.board.locked[books.number] & self.runs
        self.leaves = books.board.evicted[books.number] & ~self.locked
        self.budget = policy.drains

    def best(self) -> tuple[Share, np.ndarray]:
        """The best plan seen, as one row, and the mask of board jobs that it keeps where they are."""
        stay, none = self.runs & ~self.leaves, self.locked
        pins, plans, values = self._try(np.stack([stay, none]))
        # What leaves things as they are is beaten only by the margin.
        handicap = 1.0 - self.policy.margin
        winner = 0 if values[0] * handicap <= values[1] else 1
        best = pins[winner], _row(plans, winner)
        to_beat = values[0] * handicap if winner == 0 else values[1]
        variants = self._releases(plans) if winner == 0 else self._pinnings(plans)
        if len(variants):
            pins, plans, values = self._try(variants)
            winner = int(values.argmin())
            if values[winner] < to_beat:
                best = pins[winner], _row(plans, winner)
        pinned = np.zeros(len(self.books.board.jobs), dtype=bool)
        pinned[self.books.number[best[0]]] = True
        return best[1], pinned

    def _try(self, pins: np.ndarray) -> tuple[np.ndarray, Share, np.ndarray]:
        books, rows = self.books, len(pins)
        self.budget -= rows
        shape = (rows, len(books))
        had = Share(np.broadcast_to(books.held, shape), np.broadcast_to(books.rate, shape), np.zeros(shape, dtype=bool))
        remaining, alive = np.broadcast_to(books.remaining, shape), np.ones(shape, dtype=bool)
        plans = expand(books, self.pool, self.prices, remaining, had, alive, pins)
        policy = self.policy
        values = drain(books, self.pool, self.prices, plans, completions=policy.completions, spread=policy.spread)
        return pins, plans, values

    def _longest(self, mask: np.ndarray) -> np.ndarray:
        """Numbers of the jobs in `mask`, most remaining time first, at most `longest`."""
        numbers = np.flatnonzero(mask)
        left_s = self.books.remaining[numbers] / np.maximum(self.books.rate[numbers], 1e-30)
        return numbers[np.argsort(-left_s, kind="stable")][: max(self.policy.longest, 8)]

    def _pinnings(self, plans: Share) -> np.ndarray:
        """EXPAND won: pin each of the longest jobs that it changes, and all that it changes but lets run."""
        moved = plans.changed[1] & self.runs & ~self.leaves
        rows = [self.locked | _one(len(self.books), n) for n in self._longest(moved)[: self.policy.longest]]
        lets_run = moved & (plans.devices[1] > 0)
        if lets_run.sum() > 1:
            rows.append(self.locked | lets_run)
        return np.array(rows, dtype=bool).reshape(len(rows), len(self.books))

    def _releases(self, plans: Share) -> np.ndarray:
        """STAY won: release each of the longest running jobs, and the longest 2, 4 and 8 together."""
        stay = self.runs & ~self.leaves
        if not plans.changed[1].any():
            return np.zeros((0, len(self.books)), dtype=bool)
        longest = self._longest(stay & ~self.locked)
        groups = [longest[i : i + 1] for i in range(min(len(longest), self.policy.longest))]
        groups += [longest[:num] for num in (2, 4, 8) if num <= len(longest)]
        rows = []
        for group in groups:
            row = stay.copy()
            row[group] = False
            rows.append(row)
        return np.array(rows, dtype=bool).reshape(len(rows), len(self.books))


def _one(num: int, index: int) -> np.ndarray:
    mask = np.zeros(num, dtype=bool)
    mask[index] = True
    return mask


def _row(plans: Share, row: int) -> Share:
    return Share(plans.devices[row], plans.rate[row], plans.changed[row])


def _targets(books: Books, plan: Share) -> list[Target]:
    """What the plan gives, in the order in which jobs chose."""
    key = books.remaining / books.reference_rate + np.where(books.held > 0, 0.0, books.pause_s)
    order = np.lexsort((books.number, key / books.weight, books.tier))
    return [
        Target(int(books.number[j]), int(plan.devices[j]) if plan.changed[j] else KEEP)
        for j in order
        if plan.devices[j] > 0
    ]
