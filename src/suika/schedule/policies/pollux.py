"""Pollux (OSDI'21), the scheduler's part: co-adaptive sharing by a power mean of speedups.

A job's speedup is its rate over its rate at a fair share of the cluster; the allocation maximises the power mean with p
= -1 over all jobs, a changed job's speedup being multiplied by its restart factor. Adapted: goodput is throughput here
(the global batch is fixed, so there is no statistical efficiency to trade); instead of a genetic search, jobs get their
smallest size in order of attained service (age was far worse) and then the best marginal gain of the objective per
device, which is exact for concave curves; jobs without devices count as a small speedup.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, grow, open_devices


@dataclass(frozen=True)
class Policy:
    """`order`: who gets the first devices, 0 by age, 1 by least attained service."""

    name: str = "pollux"
    round_s: float = 60.0
    power: float = -1.0
    order: int = 1

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free, now_s = facts(board), open_devices(board), snapshot.now_s
        fair = max(free // max(len(known), 1), 1)
        sizes: dict[int, int] = {}
        queue = by(known, lambda f: f.job.attained_device_s if self.order else 0.0)
        for fact in queue:
            first = fact.menu.nums[0]
            if first <= free:
                sizes[fact.number] = first
                free -= first

        def utility(fact: Fact, size: int) -> float:
            base = fact.menu.rate(fact.menu.size_for(max(fair, fact.menu.nums[0])))
            speedup = fact.menu.rate(size) / base
            if size != fact.held and fact.job.has_state:
                speedup *= max(fact.restart_factor(now_s), 1e-3)
            return -(speedup**self.power)

        def gain(fact: Fact, old: int, new: int) -> float:
            return utility(fact, new) - utility(fact, old)

        grow(queue, sizes, free, gain)
        return give(board, queue, sizes)
