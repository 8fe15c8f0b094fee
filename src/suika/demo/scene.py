"""The running cluster: what the script may ask of it, and every step that its jobs do."""

from __future__ import annotations

import time
from typing import NamedTuple

from suika.control.state import State
from suika.core.job import ENDED, Job, JobState
from suika.core.layout import Layout
from suika.demo.script import SETTLE_STEPS
from suika.runtime.events import JobEvent, StepDone
from suika.schedule.waiting import same_cut


class StepSeen(NamedTuple):
    at_s: float  # on the wall clock
    loss: float


Steps = dict[str, dict[int, StepSeen]]  # job id -> steps done -> what was seen


class Recorder:
    """Hears the jobs' reports and keeps each step; a step done again replaces its first form."""

    def __init__(self) -> None:
        self.steps: Steps = {}

    def __call__(self, report: JobEvent) -> None:
        if isinstance(report, StepDone) and report.loss is not None:
            self.steps.setdefault(report.job_id, {})[report.step] = StepSeen(time.time(), report.loss)


class LiveScene:
    """A `Scene` of a controller's state. A job that has ended counts as settled: nothing more will come of it."""

    def __init__(self, state: State) -> None:
        self.state = state

    def job(self, name: str) -> Job | None:
        return next((job for job in reversed(self.state.store.jobs()) if job.spec.name == name), None)

    def steps(self, job: str) -> int:
        found = self.job(job)
        return found.steps_done if found else 0

    def ended(self, job: str) -> bool:
        found = self.job(job)
        return found is not None and found.state in ENDED

    def settled(self, job: str) -> bool:
        found = self.job(job)
        if found is None or found.state is not JobState.RUNNING or found.plan is None:
            return found is not None and found.state in ENDED
        wish = found.spec.layout
        as_wished = not isinstance(wish, Layout) or same_cut(found.plan.layout, wish)
        leaving = any(device.node in self.state.store.draining() for device in found.plan.devices)
        return as_wished and not leaving and len(self.state.seen(found.id).steps_seen) >= SETTLE_STEPS

    def node_of(self, job: str) -> str:
        found = self.job(job)
        assert found is not None
        assert found.plan is not None
        return found.plan.devices[0].node

    def drained(self) -> str:
        return min(self.state.store.draining())
