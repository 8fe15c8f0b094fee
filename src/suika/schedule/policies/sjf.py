"""Shortest job first: waiting gangs start by predicted run time at the size asked for; nobody is resized or stopped.

A job that does not fit is passed over.
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
    name: str = "sjf"
    round_s: float = 0.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known = facts(board)
        moving = [Target(fact.number, KEEP) for fact in known if fact.leaves]
        queue = by((fact for fact in known if not fact.held), lambda f: f.time_s(f.asked))
        floor = Floor(board, moving + [Target(f.number, f.asked) for f in queue], pinned=board.running)
        for target in floor.targets:
            floor.place_at_all(target, rigid=True)
        return floor.decisions()
