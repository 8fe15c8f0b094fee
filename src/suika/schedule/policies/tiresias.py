"""Tiresias (NSDI'19): discretised two-dimensional least attained service. Needs no lengths.

A job's attained service is devices x time held. It falls from queue to queue as that passes the thresholds; lower
queues go first, within a queue the earlier start (or arrival). Rigid and preemptive. A job that has waited `promote`
times as long as it has run goes back to the first queue. Adapted: one size per job, as asked for; the first threshold
is four device-hours (best of a quarter, one, four and sixteen on the development traces).
"""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.policies.order import Fact, by, facts, give, open_devices, take_in_order


@dataclass(frozen=True)
class Policy:
    """`first_device_s`: the first queue's threshold; each further one is `ratio` times the one before."""

    name: str = "tiresias"
    round_s: float = 0.0
    first_device_s: float = 14400.0
    ratio: float = 10.0
    queues: int = 3
    promote: float = 0.0  # 0: never

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        order = by(facts(board), lambda fact: self._queue(fact, snapshot.now_s))
        return give(board, order, take_in_order(order, open_devices(board)), rigid=True)

    def _queue(self, fact: Fact, now_s: float) -> float:
        job = fact.job
        since_s = 0.0 if job.as_of_s is None else now_s - job.as_of_s
        attained = job.attained_device_s + since_s * fact.held
        ran_s = attained / max(fact.asked, 1)
        waited_s = fact.age_s(now_s) - ran_s
        queue = 0
        if not (self.promote and job.has_state and not fact.held and waited_s > self.promote * max(ran_s, 1.0)):
            threshold = self.first_device_s
            while queue < self.queues - 1 and attained >= threshold:
                queue, threshold = queue + 1, threshold * self.ratio
        # Within a queue in order of first start; jobs that never ran come after those that did, by age.
        start_s = job.started_s if job.started_s is not None else now_s + job.submitted_s * 1e-9
        return queue * 1e12 + start_s
