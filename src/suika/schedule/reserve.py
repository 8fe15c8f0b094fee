"""Reservations for big gangs: one that needs more than half of the devices starts within a bounded time, however many
small jobs come.

A gang that has waited `after` times as long as it would run alone has a reservation: for the moment at which, by
predicted ends, enough devices come free, but no later than when it has waited twice as long. Until then it goes before
others of its tier; they may use what would stand idle meanwhile: who ends before that moment, and who fits beside the
gang (EASY backfill, Lifka 1995). Once it has waited twice as long it is *due*: it starts, whoever has to make room. A
gang that came in so late is then left alone until its end, or it would soon be put out again.

Everything follows from the snapshot, nothing is remembered. J jobs, K hull points.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from suika.plan.mapping import choose_nodes
from suika.schedule.board import OUT
from suika.schedule.books import Books
from suika.schedule.menu import menu_of

NO_MORE = 2**30  # devices: nothing could be granted


@dataclass(frozen=True)
class Reservation:
    """`gang`: who has it. `barred` [K, J]: options that would keep its devices from it."""

    gang: int
    due: bool
    barred: np.ndarray


def reservation(books: Books, after: float, kept: np.ndarray) -> Reservation | None:
    """The reservation of the gang that is latest, of the highest tier; None if nobody has one, or devices lack. `kept`
    [J]: jobs that keep their devices until they end."""
    waiting = np.flatnonzero(_late(books, after) & (books.held == 0))
    if not len(waiting):
        return None
    gang = int(waiting[np.lexsort((waiting, -books.slowdown[waiting], books.tier[waiting]))[0]])
    due = bool(books.slowdown[gang] >= 2 * after)
    due_s = (2 * after - float(books.slowdown[gang])) * float(books.alone_s[gang])
    found = _when(books, gang, due, due_s, kept)
    if found is None:
        return None
    return Reservation(gang, due, _barred(books, gang, *found))


def undisturbed(books: Books, after: float) -> np.ndarray:
    """[J] mask: big gangs that run after so long a wait; who waits on a higher tier may still stop them."""
    runs = _late(books, after) & (books.held > 0)
    if not runs.any():
        return runs
    highest: float = books.tier[books.held == 0].min(initial=np.inf)
    return runs & (books.tier <= highest)


def _late(books: Books, after: float) -> np.ndarray:
    return (2 * books.smallest > books.board.num_usable) & (books.slowdown >= after)


def _when(books: Books, gang: int, due: bool, due_s: float, kept: np.ndarray) -> tuple[float, int] | None:
    """In how many seconds the gang can have its devices where it needs them, and how many it leaves over then."""
    runs = np.flatnonzero(books.held)
    held = books.held[runs]
    firm = (kept | books.locked | ~books.stoppable | (books.tier < books.tier[gang]))[runs]
    ends_s = books.pausing_s[runs] + books.remaining[runs] * books.step_s[runs]
    if due:
        ends_s = np.where(firm, ends_s, 0.0)
    order = ends_s.argsort(kind="stable")
    enough = _fewest_ends(books, gang, runs[order])
    if enough is None:
        return None
    at_s = float(ends_s[order[enough - 1]]) if enough else 0.0
    left = books.board.num_usable - int(books.smallest[gang])
    if not due and due_s < at_s:  # who then still runs makes room
        at_s = max(due_s, 0.0)
        return at_s, left - int(held[firm & (ends_s > at_s)].sum())
    return at_s, left - int(held[ends_s > at_s].sum())


def _fewest_ends(books: Books, gang: int, ending: np.ndarray) -> int | None:
    """How many of the jobs `ending` must have ended until the smallest gang fits on the nodes; None: more than all."""
    board = books.board
    menu = menu_of(board.fabric, board.jobs[books.number[gang]])
    shapes = [option.shape for option in menu.near_best[menu.nums[0]]]
    node_of, num_nodes = board.fabric.node_of, board.fabric.num_nodes
    usable = ~(board.must_leave | board.slow)
    nobodys = (board.holder < 0) & (board.holder != OUT)  # promised devices come free soon
    free = np.bincount(node_of[nobodys], minlength=num_nodes).astype(np.int64)
    taken = np.zeros_like(free)

    def fits(num: int) -> bool:
        ended = [board.positions[number] for number in books.number[ending[:num]].tolist()]
        come = np.concatenate([np.zeros(0, dtype=np.int32), *ended])
        room = free + np.bincount(node_of[come[usable[come]]], minlength=num_nodes)
        return any(choose_nodes(shape, room, taken) is not None for shape in shapes)

    found = bisect_left(range(len(ending) + 1), True, key=fits)
    return found if found <= len(ending) else None


def _barred(books: Books, gang: int, at_s: float, spare: int) -> np.ndarray:
    """Options that last beyond `at_s` on devices that are not spare then; these are granted by least remaining time."""
    in_time = books.pause_s + books.remaining * books.hull_step_s <= at_s
    others = books.tier >= books.tier[gang]
    others[gang] = False
    granted = np.zeros(len(books), dtype=np.int64)
    more = np.where(books.held > 0, NO_MORE, books.smallest)
    larger = books.hull_devices > books.held
    grows = larger.any(axis=0) & (books.held > 0)
    first = larger.argmax(axis=0)
    more[grows] = (books.hull_devices[first, books.places] - books.held)[grows]
    for j in np.lexsort((books.time_s, books.held > 0)).tolist():  # who waits first
        if spare <= 0:
            break
        # Who may not be stopped could stand where the gang needs whole nodes, for longer than it can wait.
        if others[j] and books.stoppable[j] and more[j] <= spare and not in_time[:, j].all():
            granted[j], spare = more[j], spare - int(more[j])
    barred: np.ndarray = others & ~in_time & (books.hull_devices > books.held + granted)
    return barred
