"""Jobs come up, train, save, end, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable

from suika.core.cluster import Device
from suika.runtime.events import Ended, Outcome, Released, StepDone

from .conftest import Watched, plan, spec


def test_a_job_runs_to_its_end(run: Callable[..., Watched]) -> None:
    job = spec(steps=5)
    job_run = run(job)
    assert job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60) >= 1
    ended = job_run.wait(Ended)
    assert (ended.outcome, ended.step, ended.snapshot_step) == (Outcome.FINISHED, 5, 5)
    steps = [event.step for event in job_run.events if isinstance(event, StepDone)]
    assert steps == [1, 2, 3, 4, 5]
    released = job_run.wait(Released)
    assert set(released.devices) == {Device("a", 0), Device("a", 1), Device("b", 0), Device("b", 1)}
