"""FIFO: gangs start in order of arrival at the size that was asked for; nobody is resized or stopped.

The oldest waiting job blocks those behind it, as in a plain batch queue.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import asked_size, must_move, waiting
from suika.schedule.realise import Floor, Target


@dataclass(frozen=True)
class Policy:
    name: str = "fifo"

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        queue = [Target(number, asked_size(board, number)) for number in waiting(board)]
        floor = Floor(board, must_move(board) + queue, pinned=board.running)
        for target in floor.targets:
            if not floor.place_at_all(target, rigid=True):
                break
        return floor.decisions()
