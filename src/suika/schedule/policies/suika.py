"""Suika: expand, then balance by trying plans out before adopting one.

Candidates are EXPAND with some jobs pinned to what they have: all of them (STAY), none (EXPAND), and both with single
long jobs released or pinned; and STAY with single long jobs held back that it would start. Each is valued by a short
simulated drain of the queue with every later move charged; the most promising are stood on the topology and valued
again as they turn out there, where others may make room for who finds none, and the best of those is adopted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.books import Books
from suika.schedule.drain import drain
from suika.schedule.expand import Prices, Share, expand
from suika.schedule.guards import Limits, guards
from suika.schedule.realise import KEEP, Floor, Target, realise, stand

LEAST_COMPLETIONS, LEAST_SCREENED = 6, 4
OVERDUE = 1e30  # value of a plan that lets a gang wait which is due


@dataclass(frozen=True)
class Policy:
    """`tax`, `kappa`: the price of a device (see expand). `spread`: weight of the last completion in a plan's value.
    `longest`: single jobs tried in each way of the balance step, as long as jobs x tried stay within `breadth`.
    `finalists`: plans that are stood on the topology. `completions`: how far a drain goes before the fluid rest. With
    many jobs both effort and gain shrink: jobs x completions stay within `budget`, half of that where all plans are
    looked at, and others make room for as many finalists as jobs x finalists stay within a quarter of it.

    Guards. `repay`: pauses that each change of a running job must save beyond its own. `moving_share`: largest part of
    its run time that a job may spend moving, beyond `free_moves` moves. `residency`: pauses that a job runs undisturbed
    after a change. `patience`: slowdown from which on a job gains weight. `reserve`: slowdown from which on a gang of
    more than half of the devices has a reservation; at twice that it starts."""

    name: str = "suika"
    round_s: float = 0.0
    tax: float = 2.0
    kappa: float = 1.0
    spread: float = 1.0
    repay: float = 1.0
    moving_share: float = 1.0
    free_moves: int = 5
    residency: float = 0.0
    patience: float = 30.0
    reserve: float = 4.0
    longest: int = 6
    breadth: int = 8192
    finalists: int = 4
    completions: int = 16
    budget: int = 1024

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        books = Books(board, self.patience)
        if not len(books) or not board.num_usable:
            return realise(board, [], pinned=board.running)
        search = _Search(self, books)
        made = search.best().decisions()
        return made + search.kept_waiting({decision.job_id for decision in made})


class _Search:
    """One decision's search. A plan is a row of `Share`, made from a row of pins (jobs that keep what they have)."""

    def __init__(self, policy: Policy, books: Books) -> None:
        self.policy, self.books = policy, books
        self.pool = books.board.num_usable
        self.prices = Prices(policy.tax, policy.kappa)
        each = policy.budget // max(len(books), 1)
        self.completions = min(policy.completions, max(each, LEAST_COMPLETIONS))
        self.screened = min(policy.completions, max(each // 2, LEAST_SCREENED))
        self.rooms = max(each // 4, 1)
        self.tried = min(policy.longest, max(policy.breadth // max(len(books), 1), 1))
        self.runs = books.held > 0
        self.guards = guards(books, Limits(policy.moving_share, policy.free_moves, policy.residency, policy.reserve))
        self.stays, self.leaves = self.guards.stays, self.guards.leaves
        if self.guards.reserved is not None:
            books.put_first(self.guards.reserved.gang)

    def best(self) -> Floor:
        """The best plan seen, stood on the topology."""
        pins = np.stack([self.runs & ~self.leaves, self.stays])
        plans = self._expand(pins)
        if len(_distinct(plans)) == 1:
            return self._best_floor(pins, plans, np.zeros(1, dtype=np.int64))
        held_back = self._starts(plans)
        variants = np.concatenate([self._releases(pins[0]), self._pinnings(pins[1], plans)])
        barred = _with(np.zeros(len(self.books), dtype=bool), held_back, True)
        if len(variants) + len(barred):
            barred = np.concatenate([np.zeros_like(variants), barred])
            variants = np.concatenate([variants, _with(pins[0], held_back, False)])
            more = self._expand(variants, barred)
            fresh = _distinct(more, known=plans)
            pins, plans = np.concatenate([pins, variants[fresh]]), _join(plans, _rows(more, fresh))
        # All as planned, then the most promising as they turn out on the topology; staying put is always among them.
        finalists = np.arange(len(pins))
        if len(pins) > self.policy.finalists:
            finalists = np.argsort(self._value(plans, self.screened), kind="stable")[: self.policy.finalists]
            if 0 not in finalists:
                finalists = np.append(finalists, 0)
        return self._best_floor(pins, plans, finalists)

    def _expand(self, pins: np.ndarray, barred: np.ndarray | None = None) -> Share:
        """A plan for each row of pins [B, J]; `barred` jobs get nothing. Who may not be stopped, and would be, is
        pinned: `pins` is rewritten."""
        books, shape = self.books, pins.shape
        had = Share(
            np.broadcast_to(books.held, shape), np.broadcast_to(books.step_s, shape), np.zeros(shape, dtype=bool)
        )
        remaining = np.broadcast_to(books.remaining, shape)
        alive = np.ones(shape, dtype=bool) if barred is None else ~barred
        while True:
            plans = expand(books, self.pool, self.prices, remaining, had, alive, pins, self.guards.barred, filling=True)
            stopped = (plans.devices == 0) & self.guards.firm & ~pins
            if not stopped.any():
                return plans
            pins |= stopped

    def _value(self, plans: Share, completions: int) -> np.ndarray:
        policy, books = self.policy, self.books
        value = drain(books, self.pool, self.prices, plans, completions=completions, spread=policy.spread)
        changes_s: np.ndarray = (plans.changed & self.runs) @ (books.pause_s * books.value_weight)
        reserved = self.guards.reserved
        if reserved is not None and reserved.due:
            value = value + np.where(plans.devices[:, reserved.gang] > 0, 0.0, OVERDUE)
        return value + policy.repay * changes_s

    def _best_floor(self, pins: np.ndarray, plans: Share, rows: np.ndarray) -> Floor:
        """The best of some plans as they turn out on the topology. `rows`: if chosen, the most promising first.

        Where a job of the first few finds too little room although the pool has enough, the plan is also stood with
        everyone free to make room, at the same size elsewhere: in the usual order, and with those jobs first.
        """
        found: dict[bytes, tuple[Floor, Share]] = {}  # by outcome: of those that turn out alike the first will do

        def outcome_of(floor: Floor) -> Share:
            outcome = self._outcome(floor)
            found.setdefault(_signature(outcome.devices, outcome.changed) + outcome.step_s.tobytes(), (floor, outcome))
            return outcome

        stood = {row: outcome_of(self._stand(pins[row], plans, row)) for row in rows.tolist()}
        for row in rows.tolist()[: self.rooms]:
            short = stood[row].devices < plans.devices[row]
            if short.any():
                if not np.array_equal(pins[row], self.stays):
                    outcome_of(self._stand(self.stays, plans, row))
                outcome_of(self._stand(self.stays, plans, row, first=short))
        tried = list(found.values())
        if len(tried) == 1:
            return tried[0][0]
        return tried[int(self._value(_stack([outcome for _, outcome in tried]), self.completions).argmin())][0]

    def _stand(self, pins: np.ndarray, plans: Share, row: int, first: np.ndarray | None = None) -> Floor:
        """Place one plan's jobs in the order in which they chose, `first` [J] before others of their tier."""
        books = self.books
        pinned = np.zeros(len(books.board.jobs), dtype=bool)
        pinned[books.number[pins]] = True
        later = np.zeros(len(books), dtype=bool) if first is None else ~first
        order = np.lexsort((books.number, books.time_s / books.weight, later, books.tier))
        devices, changed = plans.devices[row], plans.changed[row]
        wanted = order[(devices[order] > 0) & ~pins[order]]
        targets = [Target(int(books.number[j]), int(devices[j]) if changed[j] else KEEP) for j in wanted]
        return stand(books.board, targets, pinned)

    def kept_waiting(self, decided: set[str]) -> list[Decision]:
        """Why others wait for which there is room: devices are kept for a bigger gang."""
        reserved, books = self.guards.reserved, self.books
        if reserved is None:
            return []
        sentence = f"devices are being kept for a gang of {books.smallest[reserved.gang]} that has waited long"
        waits = books.number[reserved.barred.any(axis=0) & ~self.runs]
        names = [books.board.jobs[number].id for number in waits.tolist()]
        reason = Reason(ReasonCode.RESERVED, sentence)
        return [Decision(name, Action.WAIT, reason) for name in names if name not in decided]

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

    def _starts(self, plans: Share) -> list[np.ndarray]:
        """The longest of the jobs that STAY would start, each by itself."""
        starts = np.flatnonzero((plans.devices[0] > 0) & ~self.runs)
        left_s = self.books.remaining[starts] / self.books.reference_rate[starts]
        return [np.array([job]) for job in starts[np.argsort(-left_s, kind="stable")][: self.tried]]

    def _pinnings(self, pins: np.ndarray, plans: Share) -> np.ndarray:
        """From EXPAND: pin each of the longest jobs that it changes, and all that it changes but lets run."""
        moved = plans.changed[1] & self.runs & ~self.leaves
        groups: list[np.ndarray] = [np.array([job]) for job in self._longest(moved)[: self.tried]]
        lets_run = np.flatnonzero(moved & (plans.devices[1] > 0))
        if len(lets_run) > 1:
            groups.append(lets_run)
        return _with(pins, groups, True)

    def _releases(self, pins: np.ndarray) -> np.ndarray:
        """From STAY: release each of the longest pinned jobs, and the longest 2, 4 and 8 together."""
        longest = self._longest(pins & ~self.stays)
        groups: list[np.ndarray] = [np.array([job]) for job in longest[: self.tried]]
        groups += [longest[:num] for num in (2, 4, 8) if num <= len(longest)]
        return _with(pins, groups, False)


def _with(pins: np.ndarray, groups: list[np.ndarray], value: bool) -> np.ndarray:
    """Copies of `pins`, one per group, with the group's jobs set to `value`."""
    rows = np.tile(pins, (len(groups), 1))
    for row, group in zip(rows, groups, strict=True):
        row[group] = value
    return rows


def _stack(rows: Sequence[Share]) -> Share:
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
