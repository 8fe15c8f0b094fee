"""Lyra (EuroSys'23), its elastic scheduling: base demands first, then a knapsack of extras.

Waiting jobs are admitted by predicted run time at their base demand (SJF), running jobs keep theirs. What is left is
shared by a multiple-choice knapsack over all admitted jobs: a job may take any larger size, worth the run time that it
saves. Adapted: the base demand is the smallest size; capacity loans from inference clusters are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, open_devices


@dataclass(frozen=True)
class Policy:
    """`repay`: a running job's change counts as a saving only beyond this many times its pause."""

    name: str = "lyra"
    round_s: float = 0.0
    repay: float = 2.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        admitted = [fact for fact in known if fact.held]
        free -= sum(fact.menu.nums[0] for fact in admitted)
        for fact in by((f for f in known if not f.held), lambda f: f.time_s(f.menu.nums[0])):
            if fact.menu.nums[0] <= free:
                admitted.append(fact)
                free -= fact.menu.nums[0]
        options = [[n for n in fact.menu.nums if n in fact.menu.hull[0] or n == fact.held] for fact in admitted]
        values = [[self._worth(fact, n) for n in sizes] for fact, sizes in zip(admitted, options, strict=True)]
        chosen = knapsack(
            [[n - f.menu.nums[0] for n in s] for f, s in zip(admitted, options, strict=True)], values, free
        )
        sizes = {fact.number: s[c] for fact, s, c in zip(admitted, options, chosen, strict=True)}
        return give(board, admitted, sizes, stays_first=False)

    def _worth(self, fact: Fact, size: int) -> float:
        """Seconds saved against the base demand."""
        saved_s = fact.time_s(fact.menu.nums[0]) - fact.time_s(size)
        return saved_s - (self.repay * fact.pause_s if fact.held and size != fact.held else 0.0)


def knapsack(weights: list[list[int]], values: list[list[float]], capacity: int) -> list[int]:
    """Multiple choice: one (weight, value) per item, weights within `capacity`, greatest sum of values; exact.

    Every item must have a choice of weight 0. Returns the choice of each item.
    """
    capacity = max(capacity, 0)
    best = np.zeros(capacity + 1)  # by capacity used at most
    picks: list[np.ndarray] = []
    for item_weights, item_values in zip(weights, values, strict=True):
        table = np.full((len(item_weights), capacity + 1), -np.inf)
        for row, (weight, value) in enumerate(zip(item_weights, item_values, strict=True)):
            if weight <= capacity:
                table[row, weight:] = best[: capacity + 1 - weight] + value
        picks.append(table.argmax(axis=0))
        best = table.max(axis=0)
    chosen, left = [], capacity
    for item_weights, pick in zip(reversed(weights), reversed(picks), strict=True):
        row = int(pick[left])
        chosen.append(row)
        left -= item_weights[row]
    return chosen[::-1]
