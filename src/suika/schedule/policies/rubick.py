"""Rubick (MLSys'25): reconfigurable jobs, resources by the slopes of their curves.

Each job has a minimum demand: the fewest devices that, with the best plan, are as fast as what was asked for. Waiting
jobs are given at least that; if devices are short, running jobs above their minimum are shrunk, lowest slope (rate lost
per device, relative to the rate as asked for) first. A newcomer goes on to take devices from those above their minimum
while it gains more than they lose. What is left goes to the highest slopes. Adapted: slopes are over feasible sizes;
jobs are not preempted; waiting jobs go by predicted run time, not by age (far better here); a running job is resized
only when `residency` seconds have passed since its last change.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, grow, open_devices


@dataclass(frozen=True)
class Policy:
    """
    `shortest`: waiting jobs by predicted run time (found much better here) instead of by age.
    `repay`: growth must save so many pauses."""

    name: str = "rubick"
    round_s: float = 0.0
    residency: float = 0.0
    shortest: int = 1
    repay: float = 1.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        sizes = {fact.number: fact.held for fact in known if fact.held}
        free -= sum(sizes.values())
        settled = [f for f in known if f.held and snapshot.now_s - (f.job.last_change_s or 0.0) >= self.residency]
        started: list[Fact] = []
        queue = by((f for f in known if not f.held), lambda f: f.time_s(f.asked) if self.shortest else 0.0)
        for fact in queue:
            need = _minimum(fact)
            shrunk, room = _shrink(settled, sizes, free, need)
            if room < need and fact.menu.nums[0] <= room:
                need = fact.menu.size_for(room)  # less than its minimum is better than to wait
            if room >= need:
                sizes.update(shrunk)
                sizes[fact.number] = need
                free = room - need
                started.append(fact)

        for fact in started:
            free = _take(fact, settled, sizes, free)

        def gain(fact: Fact, old: int, new: int) -> float:
            saved_s = fact.time_s(old) - fact.time_s(new)
            if fact.held == old and (fact not in settled or saved_s <= self.repay * fact.pause_s):
                return 0.0
            return _relative(fact, new) - _relative(fact, old)

        grow(known, sizes, free, gain)
        running = [fact for fact in known if fact.held]
        return give(board, running + started, sizes)


def _minimum(fact: Fact) -> int:
    """The fewest devices that are as fast as those asked for."""
    wanted = fact.menu.rate(fact.asked) * 0.999
    return min(n for n in fact.menu.nums if fact.menu.rate(n) >= wanted)


def _take(fact: Fact, settled: list[Fact], sizes: dict[int, int], free: int) -> int:
    """Let a newcomer grow at the expense of running jobs while all together gain rate; rewrites `sizes`, gives what is
    free then."""
    while True:
        now = sizes[fact.number]
        larger = next((n for n in fact.menu.nums if n > now and fact.menu.rate(n) > fact.menu.rate(now)), now)
        if larger - now <= free:
            return free  # what is free is shared out later
        shrunk, room = _shrink(settled, sizes, free, larger - now)
        won = _relative(fact, larger) - _relative(fact, now)
        losers = [other for other in settled if other.number in shrunk]
        lost = sum(_relative(f, sizes[f.number]) - _relative(f, shrunk[f.number]) for f in losers)
        if not shrunk or won <= lost:
            return free
        sizes.update(shrunk)
        sizes[fact.number], free = larger, room - (larger - now)


def _relative(fact: Fact, size: int) -> float:
    """Rate relative to that as asked for; a size that it has no option of counts as the next smaller one."""
    return fact.menu.rate(fact.menu.size_for(size)) / fact.menu.rate(fact.asked)


def _shrink(settled: list[Fact], sizes: dict[int, int], free: int, need: int) -> tuple[dict[int, int], int]:
    """Smaller sizes of running jobs, never below their minimum, until `need` devices are free; and how many are."""
    shrunk: dict[int, int] = {}
    while free < need:
        offers = []
        for fact in settled:
            now = shrunk.get(fact.number, sizes[fact.number])
            smaller = [n for n in fact.menu.nums if _minimum(fact) <= n < now]
            if smaller:
                lost = _relative(fact, now) - _relative(fact, smaller[-1])
                offers.append((lost / (now - smaller[-1]), fact.number, now, smaller[-1]))
        if not offers:
            break
        _, number, now, smaller_size = min(offers)
        shrunk[number] = smaller_size
        free += now - smaller_size
    return (shrunk, free) if free >= need else ({}, free - sum(sizes[n] - s for n, s in shrunk.items()))
