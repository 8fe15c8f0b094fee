"""Sia (SOSP'23): an integer program over configurations, in rounds.

Each job may take no devices or one configuration: a power of two within a node, or whole nodes; at most twice what it
holds, its smallest size to begin with. With G the job's rates, each divided by its smallest configuration's and, where
it differs from what it has, multiplied by a restart factor, the program maximises for p < 0

    sum over jobs of  lambda x [gets nothing: -1] - |G[config]|^p     (p = -0.5)

Adapted: lambda is 2.1 here (1.1 in the paper): what a job loses by getting nothing then outweighs what others gain by
growing, which took 9 to 25 % off the average completion time; p is -1 here (best of -0.25, -0.5 and -1). One device
type makes the program a multiple-choice knapsack, solved exactly by dynamic programming; a round also begins at
arrivals and ends, which helped it in every trace tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import Board, board_of
from suika.schedule.policies.lyra import knapsack
from suika.schedule.policies.order import Fact, by, facts, give, open_devices


@dataclass(frozen=True)
class Policy:
    """`power` and `penalty` are the paper's p and lambda; `growth`: how many times its size a job may take at once."""

    name: str = "sia"
    round_s: float = 60.0
    power: float = -1.0
    penalty: float = 2.1
    growth: int = 2

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        choices = [[0, *self._configurations(board, fact)] for fact in known]
        values = [
            [0.0] + [self._value(fact, size, snapshot.now_s) for size in sizes[1:]]
            for fact, sizes in zip(known, choices, strict=True)
        ]
        chosen = knapsack(choices, values, free)
        sizes = {fact.number: row[pick] for fact, row, pick in zip(known, choices, chosen, strict=True)}
        # The largest are placed first, while whole nodes are still whole.
        return give(board, by(known, lambda f: -sizes[f.number]), sizes)

    def _configurations(self, board: Board, fact: Fact) -> list[int]:
        node = int(board.fabric.size.max())
        first = fact.menu.nums[0]
        usual = [n for n in fact.menu.nums if n % node == 0 or (n < node and n & (n - 1) == 0)]
        limit = max(self.growth * fact.held, first) if fact.held else first
        return sorted({first, *(n for n in usual if n <= limit), *([fact.held] if fact.held in fact.menu.best else [])})

    def _value(self, fact: Fact, size: int, now_s: float) -> float:
        """What it adds to the program's objective to give `size` instead of nothing."""
        goodput = fact.menu.rate(size) / fact.menu.rate(fact.menu.nums[0])
        if size != fact.held and fact.job.has_state:
            goodput *= max(fact.restart_factor(now_s), 1e-3)
        return fact.job.weight * (self.penalty - goodput**self.power)
