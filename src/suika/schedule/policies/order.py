"""Job numbers in the orders that most policies share. Higher priority always goes first, then age, then id."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from suika.core.snapshot import JobView
from suika.schedule.board import Board
from suika.schedule.menu import Menu, menu_of
from suika.schedule.realise import KEEP, Target


def menu(board: Board, number: int) -> Menu:
    return menu_of(board.fabric, board.jobs[number])


def asked_size(board: Board, number: int) -> int:
    """The feasible size nearest below what the user asked for; the largest where a job only gives a range."""
    job = board.jobs[number]
    return menu(board, number).size_for(job.requested_devices or job.max_devices)


def by(board: Board, numbers: Iterable[int], key: Callable[[JobView], float]) -> list[int]:
    """`numbers` by (priority descending, `key`, age, id)."""
    jobs = board.jobs
    return sorted(numbers, key=lambda n: (-jobs[n].priority, key(jobs[n]), n))


def schedulable(board: Board) -> list[int]:
    """Jobs that a policy may decide about: no move in flight, and some option exists."""
    return [n for n in range(len(board.jobs)) if not board.locked[n] and menu(board, n)]


def waiting(board: Board) -> list[int]:
    """Waiting jobs that some shape of this cluster could run, oldest first within each priority."""
    numbers = (int(n) for n in np.flatnonzero(~board.running))
    return by(board, (n for n in numbers if menu(board, n)), lambda job: 0.0)


def must_move(board: Board) -> list[Target]:
    """Running jobs that must leave a draining node, to go on elsewhere at their size."""
    return [Target(int(n), KEEP) for n in np.flatnonzero(board.evicted & ~board.locked)]
