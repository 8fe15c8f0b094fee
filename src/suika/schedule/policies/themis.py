"""Themis (NSDI'20): finish-time fairness by leases.

rho = predicted completion time in the shared cluster / completion time on an equal share of its own. Devices whose
lease has run out are offered to the fraction `1 - filter` of jobs with the largest rho; among those the winners are the
ones that hold the cluster's fairness best, here: largest rho first. Adapted: one gang per job at the size asked for, so
the auction's bids over sizes fall away; leases are checked at events and every `round_s`.
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, open_devices, take_in_order


@dataclass(frozen=True)
class Policy:
    name: str = "themis"
    round_s: float = 600.0  # a lease
    filter: float = 0.8  # jobs below this quantile of rho wait for devices that nobody above it wants

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free, now_s = facts(board), open_devices(board), snapshot.now_s
        contention = max(sum(fact.asked for fact in known) / max(free, 1), 1.0)

        def rho(fact: Fact) -> float:
            total_steps = fact.steps + fact.job.done_steps
            alone_s = total_steps / fact.menu.rate(fact.asked) * contention
            return (fact.age_s(now_s) + fact.time_s(fact.asked)) / max(alone_s, 1e-9)

        fairness = {fact.number: rho(fact) for fact in known}
        ranked = sorted(fairness.values())
        offered = ranked[int(self.filter * (len(ranked) - 1))] if ranked else 0.0

        def key(fact: Fact) -> float:
            changed_s = fact.job.last_change_s
            if fact.held and not fact.leaves and changed_s is not None and now_s - changed_s < self.round_s:
                return -1e18  # its lease holds
            worst = fairness[fact.number]
            return -worst if worst >= offered else 1e9 - worst

        order = by(known, key)
        return give(board, order, take_in_order(order, free), rigid=True)
