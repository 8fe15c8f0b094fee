"""FIFO with EASY backfill (Lifka, 1995): the oldest waiting job has a reservation, others may use what it cannot.

The head of the queue is promised the moment at which, by predicted ends, enough devices come free. A job behind it may
start now if it ends before that moment, or needs no more than what the head will leave over then. Rigid, no preemption.
Adapted: run times come from the same predictor as every policy's, not from users' limits.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import Board, board_of
from suika.schedule.books import Books
from suika.schedule.policies.order import Fact, by, facts
from suika.schedule.realise import KEEP, Floor, Target


@dataclass(frozen=True)
class Policy:
    name: str = "fifo-backfill"
    round_s: float = 0.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known = facts(board)
        queue = by((fact for fact in known if not fact.held), lambda f: 0.0)
        moving = [Target(fact.number, KEEP) for fact in known if fact.leaves]
        floor = Floor(board, moving + [Target(f.number, f.asked) for f in queue], pinned=board.running)
        for target in moving:
            floor.place_at_all(target, rigid=True)
        ends = _ends(board)
        reserved: tuple[float, int] | None = None  # (the head's start, devices left over then)
        for fact in queue:
            time_s = fact.pause_s + fact.time_s(fact.asked)
            if reserved is None:
                if floor.place_at_all(Target(fact.number, fact.asked), rigid=True):
                    ends.append((time_s, fact.asked))
                else:
                    reserved = _reservation(fact, ends, int((floor.available - floor.occupied).sum()))
            elif time_s <= reserved[0]:
                floor.place_at_all(Target(fact.number, fact.asked), rigid=True)
            elif fact.asked <= reserved[1] and floor.place_at_all(Target(fact.number, fact.asked), rigid=True):
                reserved = reserved[0], reserved[1] - fact.asked
        return floor.decisions()


def _ends(board: Board) -> list[tuple[float, int]]:
    """(seconds until it ends, devices) of each running job."""
    books = Books(board)
    runs = (books.held > 0) & (books.rate > 0)
    left_s = books.pausing_s[runs] + books.remaining[runs] / books.rate[runs]
    return list(zip(left_s.tolist(), books.held[runs].tolist(), strict=True))


def _reservation(head: Fact, ends: list[tuple[float, int]], free: int) -> tuple[float, int]:
    """When the head can start, and what it leaves over then. Fragmented devices count as free."""
    at_s = 0.0
    for end_s, devices in sorted(ends):
        if free >= head.asked:
            break
        free, at_s = free + devices, end_s
    return at_s, max(free - head.asked, 0)
