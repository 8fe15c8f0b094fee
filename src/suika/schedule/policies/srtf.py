"""Shortest remaining time first, rigid and preemptive: gangs at the size asked for, by predicted remaining run time.

`charge`: how many (re)start's pauses count into the time of a job that does not run; 1 keeps jobs from stopping others
for less than the restart costs, 4 was best of 0, 1, 2 and 4 on the development traces.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import by, facts, give, open_devices, take_in_order


@dataclass(frozen=True)
class Policy:
    name: str = "srtf"
    round_s: float = 0.0
    charge: float = 4.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        order = by(facts(board), lambda f: f.time_s(f.asked) + (0.0 if f.held else self.charge * f.pause_s))
        return give(board, order, take_in_order(order, open_devices(board)), rigid=True)
