"""What running jobs have taught the estimator: kept per job and device type, stored, and back after a restart.

Samples gather in a `Window` per generation. At every doubling of their number (then now and then) they are summed up;
only when that is news, a new layout or noticeably other times, a calibration is derived anew, stored and told to
pricing. All else is a comparison of two counts, so a thousand jobs cost nothing while they go on as before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from suika.control.store import Store
from suika.core.errors import SpecError
from suika.core.job import Job, JobSpec
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known, Pool

FIRST_LOOK = 2  # samples of each rank; the next look is at twice as many
LOOK_EVERY = 32  # samples of each rank between later looks
# Each has a job's curve made anew, some 30 ms of the process that computes: a thousand jobs that start at once are
# taken in over minutes, so that decisions do not wait.
LESSONS_PER_S, LESSONS_AT_ONCE = 10.0, 8.0
JOBS_POOLED = 32  # the newest of a device type


@dataclass
class Window:
    """The latest samples of each rank of a job's present generation."""

    by_rank: dict[int, deque[StepSample]] = field(default_factory=dict)
    num_samples: int = 0
    next_look: int = FIRST_LOOK

    def add(self, sample: StepSample) -> None:
        self.by_rank.setdefault(sample.rank, deque(maxlen=8)).append(sample)
        self.num_samples += 1

    def clear(self) -> None:
        self.by_rank, self.num_samples, self.next_look = {}, 0, FIRST_LOOK

    def __iter__(self) -> Iterator[StepSample]:
        return (sample for samples in list(self.by_rank.values()) for sample in list(samples))

    @property
    def newest(self) -> list[StepSample]:
        """Of each rank."""
        return [samples[-1] for samples in list(self.by_rank.values())]

    def due(self, num_ranks: int) -> bool:
        """Whether it is time to sum them up; says so once."""
        if self.num_samples < self.next_look * num_ranks:
            return False
        self.next_look += min(self.next_look, LOOK_EVERY)
        return True


class Estimator(Protocol):
    """What is asked of pricing here."""

    def device_type(self, plan: Plan) -> str: ...

    def step_s(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> float: ...

    def learnt(self, spec: JobSpec, plan: Plan, known: Known, samples: Iterable[StepSample]) -> Known: ...


class Learned:
    """Changed by the controller's loop alone, read from anywhere: what is handed out is immutable."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._jobs: dict[str, dict[str, Known]] = {}
        self._pools: dict[str, Pool] = {}
        self._lessons_left, self._counted_s = LESSONS_AT_ONCE, clock()
        self.dropped: list[str] = []  # jobs whose record another version wrote
        for (job_id, device_type), record in store.calibrations().items():
            try:
                self._jobs.setdefault(job_id, {})[device_type] = Known.from_dict(record)
            except (SpecError, KeyError, TypeError, ValueError):
                self.dropped.append(job_id)
        for device_type in {t for known in self._jobs.values() for t in known}:
            self._pool(device_type)

    def of(self, job_id: str) -> tuple[Known, ...]:
        """By device type: the job's own, else what others taught. The same objects until something was learned."""
        own = self._jobs.get(job_id, {})
        types = sorted({*own, *self._pools})
        return tuple(own[t] if t in own else self._pools[t].known for t in types)

    def own(self, job_id: str) -> dict[str, Known]:
        """By device type: what the job itself has shown."""
        return dict(self._jobs.get(job_id, {}))

    def begin_round(self) -> None:
        """Before the calls of `settle` of one round of the controller's loop."""
        now_s = self._clock()
        earned = LESSONS_PER_S * (now_s - self._counted_s)
        self._lessons_left, self._counted_s = min(self._lessons_left + earned, LESSONS_AT_ONCE), now_s

    def settle(self, job: Job, plan: Plan, window: Window, step_s: float | None, pricing: Estimator) -> None:
        """Take in what a running job shows: its samples when a look is due, its step time against the prediction."""
        device_type = pricing.device_type(plan)
        before = self._jobs.get(job.id, {}).get(device_type)
        known = before or Known.nothing(self._base(device_type), job.id)
        if self._lessons_left >= 1 and window.due(plan.layout.num_ranks):
            learnt = pricing.learnt(job.spec, plan, known, list(window))
            self._lessons_left -= learnt is not known
            known = learnt
        if step_s is not None:
            known = known.paced(step_s / pricing.step_s(job.spec, plan, (known,)))
        if known is before or (known.pace is None and not known.seen):
            return
        self._store.calibrated(job.id, device_type, known.to_dict())
        self._jobs.setdefault(job.id, {})[device_type] = known
        self._pool(device_type)

    def _base(self, device_type: str) -> Calibration:
        pool = self._pools.get(device_type)
        return pool.calibration if pool else Calibration.prior(device_type)

    def _pool(self, device_type: str) -> None:
        """All jobs' lessons for the next one; the same object as long as they say about the same."""
        jobs = [known[device_type] for known in self._jobs.values() if device_type in known][-JOBS_POOLED:]
        pool, before = Pool.of(device_type, jobs), self._pools.get(device_type)
        if before is None or pool.differs(before):
            self._pools[device_type] = pool
