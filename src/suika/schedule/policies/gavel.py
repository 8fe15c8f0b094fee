"""Gavel (OSDI'20), max-min fairness: a linear program shares time, rounds bring the shares about.

The program finds for each job the fraction of time in which it should run, such that the least normalised throughput
(against an equal share, scaled by gang size) is as large as can be; what is left raises the sum. In each round jobs run
by target fraction / fraction received. Adapted: one device type here means one throughput per job; a round also begins
at arrivals and ends, but a job keeps its devices until its own round is over, and rounds are 20 minutes long (6 in the
paper; best of 6, 12, 20 and 60 on the development traces).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, open_devices, take_in_order


@dataclass(frozen=True)
class Policy:
    name: str = "gavel"
    round_s: float = 1200.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free, now_s = facts(board), open_devices(board), snapshot.now_s
        if not known:
            return give(board, [], {})
        fraction = dict(zip((f.number for f in known), _fractions(known, free), strict=True))

        def key(fact: Fact) -> float:
            changed_s = fact.job.last_change_s
            if fact.held and not fact.leaves and changed_s is not None and now_s - changed_s < self.round_s:
                return -np.inf  # in its round
            return -fraction[fact.number] / max(_received(fact, now_s), 1e-3)

        order = by(known, key)
        return give(board, order, take_in_order(order, free), rigid=True)


def _received(fact: Fact, now_s: float) -> float:
    """Part of its life in which the job has held devices."""
    job = fact.job
    since_s = 0.0 if job.as_of_s is None else now_s - job.as_of_s
    held_s = (job.attained_device_s + since_s * fact.held) / fact.asked
    return held_s / max(fact.age_s(now_s), 1.0)


def _fractions(known: list[Fact], free: int) -> list[float]:
    """max z + small x sum x:  w_j x_j >= z,  sum size_j x_j <= free,  0 <= x <= 1."""
    size = np.array([min(fact.asked, free) for fact in known], dtype=float)
    # Throughput relative to an equal share of the devices, scaled by gang size: x_j size_j J / free.
    weight = size * len(known) / max(free, 1)
    num = len(known)
    objective = np.concatenate([np.full(num, -1e-3 / num), [-1.0]])
    at_least = np.hstack([-np.diag(weight), np.ones((num, 1))])
    capacity = np.concatenate([size, [0.0]])[None]
    solved = linprog(
        objective,
        A_ub=np.vstack([at_least, capacity]),
        b_ub=np.concatenate([np.zeros(num), [free]]),
        bounds=[(0, 1)] * num + [(0, None)],
        method="highs",
    )
    assert solved.x is not None, f"shares of {num} jobs: {solved.message}"  # x = 0 is always feasible
    return [float(x) for x in solved.x[:num]]
