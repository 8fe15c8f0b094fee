"""ElasticFlow (ASPLOS'23): deadlines by minimum satisfactory shares, the rest by marginal return.

Jobs with a deadline, earliest first, get the smallest size with which they meet it; one that cannot be met any more is
served as best effort. Best-effort jobs come next at their smallest size, least remaining time first. What is left goes
step by step to the job whose throughput, relative to its own smallest size, gains most per device. Adapted: admission
control does not refuse jobs (all must be run here); traces without deadlines leave the best-effort form, unless
`tightness` gives each job the deadline submission + tightness x its run time as asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, grow, open_devices


@dataclass(frozen=True)
class Policy:
    """`repay`: growth of a running job must save this many times its pause."""

    name: str = "elasticflow"
    round_s: float = 0.0
    tightness: float = 0.0
    repay: float = 1.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        sizes: dict[int, int] = {}
        order: list[Fact] = []
        urgent = [fact for fact in known if self._deadline_s(fact) is not None]
        for fact in by(urgent, lambda f: self._deadline_s(f) or 0.0):
            slack_s = (self._deadline_s(fact) or 0.0) - snapshot.now_s - (0.0 if fact.held else fact.pause_s)
            size = min((n for n in fact.menu.nums if n <= free and fact.time_s(n) <= slack_s), default=0)
            if size:
                sizes[fact.number] = size
                free -= size
                order.append(fact)
        rest = [fact for fact in known if fact.number not in sizes]
        for fact in by(rest, lambda f: f.time_s(f.menu.nums[0]) + (0.0 if f.held else f.pause_s)):
            if fact.menu.nums[0] <= free:
                sizes[fact.number] = fact.menu.nums[0]
                free -= fact.menu.nums[0]
                order.append(fact)
        free = grow(known, sizes, free, _relative_gain)
        self._stay(order, sizes, free)
        return give(board, order, sizes)

    def _deadline_s(self, fact: Fact) -> float | None:
        job = fact.job
        if job.deadline_s is not None or not self.tightness:
            return job.deadline_s
        whole_s = (fact.steps + job.done_steps) / fact.menu.rate(fact.asked)
        return job.submitted_s + self.tightness * whole_s

    def _stay(self, order: list[Fact], sizes: dict[int, int], free: int) -> None:
        """Running jobs keep their size where the change would not repay its pause and the devices allow it."""
        for fact in order:
            size = sizes[fact.number]
            if fact.held and size != fact.held and fact.held - size <= free and not fact.leaves:
                saved_s = fact.time_s(fact.held) - fact.time_s(size)
                if saved_s <= self.repay * fact.pause_s:
                    free -= fact.held - size
                    sizes[fact.number] = fact.held


def _relative_gain(fact: Fact, old: int, new: int) -> float:
    return (fact.menu.rate(new) - fact.menu.rate(old)) / fact.menu.rate(fact.menu.nums[0])
