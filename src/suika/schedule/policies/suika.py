"""Suika: expand, then balance by trying plans out before adopting one.

Candidates are EXPAND with some jobs pinned to what they have: all of them (STAY), none (EXPAND), and both with single
long jobs released or pinned. Each is valued by a short simulated drain of the queue with every later move charged; the
most promising are stood on the topology and valued again as they turn out there, and the best of those is adopted.
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
from suika.schedule.realise import KEEP, Floor, Target, realise, stand

LEAST_COMPLETIONS = 6


@dataclass(frozen=True)
class Policy:
    """`tax`, `kappa`: the price of a device (see expand). `spread`: weight of the last completion in a plan's value.
    `margin`: part of its value by which a plan must beat staying put. `longest`: single jobs tried in the balance step.
    `finalists`: plans that are stood on the topology. `completions`: how far a drain goes before the fluid rest, as
    long as jobs x completions stay within `budget`."""

    name: str = "suika"
    round_s: float = 0.0
    tax: float = 2.0
    kappa: float = 1.0
    spread: float = 1.0
    margin: float = 0.0
    longest: int = 6
    finalists: int = 4
    completions: int = 16
    budget: int = 1024

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        books = Books(board)
        if not len(books) or not board.num_usable:
            return realise(board, [], pinned=board.running)
        return _Search(self, books).best().decisions()


class _Search:
    """One decision's search. A plan is a row of `Share`, made from a row of pins (jobs that keep what they have)."""

    def __init__(self, policy: Policy, books: Books) -> None:
        self.policy, self.books = policy, books
        self.pool = books.board.num_usable
        self.prices = Prices(policy.tax, policy.kappa)
        # The evaluation budget: with many jobs, fewer completions are followed one by one.
        self.completions = min(policy.completions, max(policy.budget // max(len(books), 1), LEAST_COMPLETIONS))
        self.runs = books.held > 0
        # May not be touched (a move in flight), may not be kept (must leave its devices).
        self.locked = books.board.locked[books.number] & self.runs
        self.leaves = books.board.evicted[books.number] & ~self.locked

    def best(self) -> Floor:
        """The best plan seen, stood on the topology."""
        pins = np.stack([self.runs & ~self.leaves, self.locked])
        plans = self._expand(pins)
        if len(_distinct(plans)) == 1:
            return self._stand(pins[0], plans, 0)
        variants = np.concatenate([self._releases(pins[0]), self._pinnings(pins[1], plans)])
        if len(variants):
            more = self._expand(variants)
            fresh = _distinct(more, known=plans)
            pins, plans = np.concatenate([pins, variants[fresh]]), _join(plans, _rows(more, fresh))
        # All as planned, then the most promising as they turn out on the topology; staying put is always among them.
        finalists = np.arange(len(pins))
        if len(pins) > self.policy.finalists:
            finalists = np.argsort(self._value(plans), kind="stable")[: self.policy.finalists]
            finalists = np.unique(np.append(finalists, 0))
        values, floors = self._settle(pins, plans, finalists)
        # What leaves things as they are is beaten only by the margin.
        values[0] *= 1.0 - self.policy.margin
        return floors[int(values.argmin())]

    def _expand(self, pins: np.ndarray) -> Share:
        """A plan for each row of pins [B, J]."""
        books, shape = self.books, pins.shape
        had = Share(
            np.broadcast_to(books.held, shape), np.broadcast_to(books.step_s, shape), np.zeros(shape, dtype=bool)
        )
        remaining, alive = np.broadcast_to(books.remaining, shape), np.ones(shape, dtype=bool)
        return expand(books, self.pool, self.prices, remaining, had, alive, pins)

    def _value(self, plans: Share) -> np.ndarray:
        policy = self.policy
        return drain(self.books, self.pool, self.prices, plans, completions=self.completions, spread=policy.spread)

    def _settle(self, pins: np.ndarray, plans: Share, rows: np.ndarray) -> tuple[np.ndarray, list[Floor]]:
        """Values and floors of some plans, as they turn out on the topology."""
        floors = [self._stand(pins[row], plans, row) for row in rows.tolist()]
        return self._value(_stack([self._outcome(floor) for floor in floors])), floors

    def _stand(self, pins: np.ndarray, plans: Share, row: int) -> Floor:
        """Place one plan's jobs in the order in which they chose."""
        books = self.books
        pinned = np.zeros(len(books.board.jobs), dtype=bool)
        pinned[books.number[pins]] = True
        key = books.remaining / books.reference_rate + np.where(self.runs, 0.0, books.pause_s)
        order = np.lexsort((books.number, key / books.weight, books.tier))
        devices, changed = plans.devices[row], plans.changed[row]
        wanted = order[(devices[order] > 0) & ~pins[order]]
        targets = [Target(int(books.number[j]), int(devices[j]) if changed[j] else KEEP) for j in wanted]
        return stand(books.board, targets, pinned)

    def _outcome(self, floor: Floor) -> Share:
        """The share that a floor comes to [J]."""
        books = self.books
        keeps = floor.placed[books.number] & self.runs
        devices, step_s = np.where(keeps, books.held, 0), np.where(keeps, books.step_s, np.inf)
        changed = self.runs & ~keeps
        for number, option in floor.moved().items():
            j = int(np.searchsorted(books.number, number))
            devices[j], step_s[j], changed[j] = option.num_devices, option.step_s, True
        return Share(devices, step_s, changed)

    def _longest(self, mask: np.ndarray) -> np.ndarray:
        """Numbers of the jobs in `mask`, most remaining time first."""
        numbers = np.flatnonzero(mask)
        left_s = self.books.remaining[numbers] / np.maximum(self.books.rate[numbers], 1e-30)
        return numbers[np.argsort(-left_s, kind="stable")]

    def _pinnings(self, pins: np.ndarray, plans: Share) -> np.ndarray:
        """From EXPAND: pin each of the longest jobs that it changes, and all that it changes but lets run."""
        moved = plans.changed[1] & self.runs & ~self.leaves
        groups: list[np.ndarray] = [np.array([job]) for job in self._longest(moved)[: self.policy.longest]]
        lets_run = np.flatnonzero(moved & (plans.devices[1] > 0))
        if len(lets_run) > 1:
            groups.append(lets_run)
        return _with(pins, groups, True)

    def _releases(self, pins: np.ndarray) -> np.ndarray:
        """From STAY: release each of the longest pinned jobs, and the longest 2, 4 and 8 together."""
        longest = self._longest(pins & ~self.locked)
        groups: list[np.ndarray] = [np.array([job]) for job in longest[: self.policy.longest]]
        groups += [longest[:num] for num in (2, 4, 8) if num <= len(longest)]
        return _with(pins, groups, False)


def _with(pins: np.ndarray, groups: list[np.ndarray], value: bool) -> np.ndarray:
    """Copies of `pins`, one per group, with the group's jobs set to `value`."""
    rows = np.tile(pins, (len(groups), 1))
    for row, group in zip(rows, groups, strict=True):
        row[group] = value
    return rows


def _stack(rows: list[Share]) -> Share:
    return Share(*(np.stack([getattr(row, name) for row in rows]) for name in ("devices", "step_s", "changed")))


def _join(one: Share, two: Share) -> Share:
    return Share(*(np.concatenate([getattr(one, n), getattr(two, n)]) for n in ("devices", "step_s", "changed")))


def _rows(plans: Share, rows: np.ndarray) -> Share:
    return Share(plans.devices[rows], plans.step_s[rows], plans.changed[rows])


def _distinct(plans: Share, known: Share | None = None) -> np.ndarray:
    """Rows that give something else than every row before them and than every row of `known`."""
    seen = set() if known is None else set(map(_signature, known.devices, known.changed))
    fresh = []
    for row, signature in enumerate(map(_signature, plans.devices, plans.changed)):
        if signature not in seen:
            seen.add(signature)
            fresh.append(row)
    return np.array(fresh, dtype=np.int64)


def _signature(devices: np.ndarray, changed: np.ndarray) -> bytes:
    return devices.tobytes() + changed.tobytes()
