"""FIFO: gangs start in order of arrival at the size that was asked for; nobody is resized or stopped.

The oldest waiting job blocks those behind it, as in a plain batch queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import by, facts
from suika.schedule.realise import KEEP, Floor, Target


@dataclass(frozen=True)
class Policy:
    name: str = "fifo"
    round_s: float = 0.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known = facts(board)
        moving = [Target(fact.number, KEEP) for fact in known if fact.leaves]
        queue = [Target(fact.number, fact.asked) for fact in by(known, lambda f: 0.0) if not fact.held]
        floor = Floor(board, moving + queue, pinned=board.running)
        for target in floor.targets:
            if not floor.place_at_all(target, rigid=True):
                break
        return floor.decisions()
