"""Shortest remaining processing time, elastic: the job that could end first takes what it can use, then the next.

A job's time is its remaining time at its best rate; it takes the largest size on its hull that is left. What remains
goes to whoever saves the most time per device. A running job changes size only if that saves more than `repay` times
its pause. Classic for one divisible server; the hull makes it skip sizes that gain less than 1 %.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, grow, open_devices


@dataclass(frozen=True)
class Policy:
    """`efficiency`: a job takes no step up its hull whose rate per added device is below this part of its first."""

    name: str = "srpt"
    round_s: float = 0.0
    repay: float = 1.0
    efficiency: float = 0.5

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        order = by(known, lambda f: f.steps / f.menu.max_rate + (0.0 if f.held else f.pause_s))
        sizes: dict[int, int] = {}
        for fact in order:
            size = self._size(fact, free)
            if size:
                sizes[fact.number] = size
                free -= size
        grow(known, sizes, free, time_saved_s)
        return give(board, order, sizes)

    def _size(self, fact: Fact, free: int) -> int:
        devices, rates = fact.menu.hull
        base = rates[0] / devices[0]
        size = 0
        for i, (num, rate) in enumerate(zip(devices.tolist(), rates.tolist(), strict=True)):
            step = (rate - rates[i - 1]) / (num - devices[i - 1]) if i else base
            if num <= free and step >= self.efficiency * base:
                size = num
        if size and 0 < fact.held <= free and not fact.leaves:
            saves_s = fact.time_s(fact.held) - fact.steps / fact.menu.rate(size)
            if saves_s <= self.repay * fact.pause_s:
                return fact.held
        return size


def time_saved_s(fact: Fact, old: int, new: int) -> float:
    """Seconds saved by growing; nothing if a job that runs on would not repay its pause."""
    saved_s = fact.time_s(old) - fact.time_s(new)
    return saved_s if old != fact.held or saved_s > fact.pause_s else 0.0
