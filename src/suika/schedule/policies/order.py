"""What the policies share: each job's facts, the usual orders, and bringing chosen sizes about.

Higher priority always goes first, then a policy's own key, then age, then id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from suika.core.decision import Decision
from suika.core.snapshot import JobView
from suika.schedule.board import Board
from suika.schedule.books import Books
from suika.schedule.menu import Menu, menu_of
from suika.schedule.realise import KEEP, Target, realise


@dataclass(frozen=True, slots=True)
class Fact:
    """One job that a policy may decide about. Sizes are device counts that the job has an option for."""

    number: int  # on the board
    job: JobView
    menu: Menu
    steps: float  # remaining, now
    held: int
    rate: float  # steps/s where it runs
    pause_s: float  # of a start or change
    asked: int  # feasible size nearest below what the user asked for
    leaves: bool  # must leave devices that are going away

    def time_s(self, size: int) -> float:
        """Remaining run time at `size`; what is observed where it runs, else as its curve says."""
        return self.steps / (self.rate if size == self.held and self.rate else self.menu.rate(size))

    def age_s(self, now_s: float) -> float:
        return now_s - self.job.submitted_s

    def restart_factor(self, now_s: float) -> float:
        """Expected share of time in which it would progress if moved now (Sia, Pollux): what it has cost so far is
        taken to go on at the same pace."""
        age_s = max(self.age_s(now_s), 1.0)
        return max(age_s - self.job.num_moves * self.pause_s, 0.0) / (age_s + self.pause_s)


def facts(board: Board) -> list[Fact]:
    """All jobs that can be decided about, by age: no move in flight that must end, and some option in this cluster."""
    books = Books(board)
    made = []
    columns = (books.number, books.remaining, books.held, books.rate, books.pause_s)
    for number, steps, held, rate, pause_s in zip(*(column.tolist() for column in columns), strict=True):
        if board.locked[number]:
            continue
        job = board.jobs[number]
        menu = menu_of(board.fabric, job)
        asked = menu.size_for(job.requested_devices or job.max_devices)
        made.append(Fact(number, job, menu, steps, held, rate, pause_s, asked, bool(board.evicted[number])))
    return made


def by(known: Iterable[Fact], key: Callable[[Fact], float]) -> list[Fact]:
    """By (priority descending, `key`, age, id); jobs come with ages ascending."""
    return sorted(known, key=lambda fact: (-fact.job.priority, key(fact), fact.number))


def open_devices(board: Board) -> int:
    """Devices that a decision is about: all but those that are going away or held by jobs with a move in flight."""
    locked = np.append(board.locked, [False] * 3)  # `holder` is negative where nobody is
    return board.num_usable - int((locked[board.holder] & ~board.must_leave).sum())


def give(
    board: Board, order: Iterable[Fact], sizes: Mapping[int, int], *, rigid: bool = False, stays_first: bool = True
) -> list[Decision]:
    """Decisions that give each job its size (by job number; absent or 0: nothing), placing in `order`.

    `stays_first` (not where sizes are `rigid`): those of one priority that keep their size are placed first and stay
    where they are, so that nobody is moved only because another came before it. On the development traces this took up
    to 17 % off the averages of most rivals; in rigid order, and for Lyra, it gave nothing.
    """
    gets = [fact for fact in order if sizes.get(fact.number)]
    if stays_first and not rigid:
        gets.sort(key=lambda fact: (-fact.job.priority, sizes[fact.number] != fact.held))
    targets = [Target(fact.number, KEEP if sizes[fact.number] == fact.held else sizes[fact.number]) for fact in gets]
    return realise(board, targets, rigid=rigid)


def take_in_order(order: Iterable[Fact], free: int) -> dict[int, int]:
    """Each job its asked size, in order, as long as that many devices are left; who does not fit is passed over."""
    sizes: dict[int, int] = {}
    for fact in order:
        if fact.asked <= free:
            sizes[fact.number] = fact.asked
            free -= fact.asked
    return sizes


def grow(
    known: Iterable[Fact], sizes: dict[int, int], free: int, gain: Callable[[Fact, int, int], float], most: int = 0
) -> int:
    """Spend `free` on larger sizes, best `gain(fact, old, new)` per device first; what is left. Rewrites `sizes`.

    Every larger size of a job is a candidate, so that a plateau of its curve is jumped over. `most`: how many times its
    size a job may grow to (0: no limit).
    """
    growing = [fact for fact in known if sizes.get(fact.number)]
    limit = {fact.number: most * sizes[fact.number] if most else 1 << 30 for fact in growing}

    def best(fact: Fact) -> tuple[float, int]:
        now = sizes[fact.number]
        larger = [n for n in fact.menu.nums if now < n <= min(now + free, limit[fact.number])]
        return max(((gain(fact, now, n) / (n - now), -n) for n in larger), default=(0.0, 0))

    offers = {fact.number: (best(fact), fact) for fact in growing}
    while free > 0 and offers:
        (value, size), fact = max(offers.values(), key=lambda offer: (offer[0], -offer[1].number))
        if value <= 0:
            break
        if -size - sizes[fact.number] > free:
            offers[fact.number] = (best(fact), fact)
            continue
        free -= -size - sizes[fact.number]
        sizes[fact.number] = -size
        offers[fact.number] = (best(fact), fact)
    return free
