"""Unmoved twins: each job again, from step 0 to its end, in one process that nobody touches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from suika.backends.local import LocalBackend
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Ended, JobEvent, Outcome, StepDone

LONGEST_S = 600.0


class Twin:
    """One job alone on one device. `losses` is by steps done."""

    def __init__(self, spec: JobSpec, backend: LocalBackend, device: int, folder: Path) -> None:
        self.spec = spec
        self.losses: dict[int, float] = {}
        self.outcome: Outcome | None = None
        self.error: str | None = None
        self._ended = threading.Event()
        job_id = f"twin-{spec.name}"
        self._run = JobRun(job_id, spec, backend, backend.cluster, folder / job_id, spec.data, self._hear)
        layout = Layout(micro_batch=spec.global_batch).resolve(spec.model)
        self._run.start(Plan(layout, Placement((backend.cluster.devices[device],))), generation=1)

    def _hear(self, event: JobEvent) -> None:
        if isinstance(event, StepDone) and event.loss is not None:
            self.losses[event.step] = event.loss
        elif isinstance(event, Ended):
            self.outcome, self.error = event.outcome, event.error
            self._ended.set()

    def wait(self, tick: Callable[[], None]) -> None:
        """Until its end; `tick` is called in between. Raises `TimeoutError`."""
        for _ in range(int(LONGEST_S / 0.1)):
            if self._ended.wait(0.1):
                return
            tick()
        raise TimeoutError(f"the twin of {self.spec.name} did not end within {LONGEST_S:.0f} s")

    def close(self) -> None:
        self._run.close()


def run_twins(
    specs: Sequence[JobSpec], backend: LocalBackend, folder: Path, tick: Callable[[Mapping[str, int]], None]
) -> dict[str, Twin]:
    """The twins of all jobs, side by side. `tick` is told each one's steps done."""
    twins = {spec.name: Twin(spec, backend, number, folder) for number, spec in enumerate(specs)}
    try:
        for twin in twins.values():
            twin.wait(lambda: tick({name: len(other.losses) for name, other in twins.items()}))
    finally:
        for twin in twins.values():
            twin.close()
    return twins


def largest_difference(losses: Mapping[int, float], twin: Mapping[int, float], steps: int) -> float:
    """max |loss - twin's loss| over all steps; infinite if either lacks a step."""
    wanted = range(1, steps + 1)
    if any(step not in losses or step not in twin for step in wanted):
        return float("inf")
    return max(abs(losses[step] - twin[step]) for step in wanted)
