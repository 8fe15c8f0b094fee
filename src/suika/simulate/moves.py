"""What moves cost in simulation: a flat number of seconds, or what the redeployment planner predicts of the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from suika.core.cluster import Cluster, Device
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Move
from suika.reshard.predict import MovePredictor, pace_of, state_bytes
from suika.reshard.state import JobShape


@dataclass(frozen=True)
class FlatMoves:
    """Each start, resume or change pauses its job for `pause_s`, on its new devices.

    Devices that a job gives up are free at once (`release_s` = 0): the pause is charged where the job goes to. A flat
    cost stands for a stop and restart, so worlds with it let a job be stopped again while it comes up, to pay again.
    """

    pause_s: float

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        return Move(self.pause_s if devices else 0.0, 0.0)

    def typical(self, job: JobView) -> float:
        return self.pause_s


@dataclass(frozen=True)
class PredictedMoves:
    """Live redeployments as the planner predicts them from each job's bytes and the cluster's links.

    A job that gives up all its devices first writes its state to storage (`release_s`), and is launched from there.
    """

    shapes: Mapping[str, JobShape]  # by job id
    cluster: Cluster

    @cached_property
    def predictor(self) -> MovePredictor:
        return MovePredictor(self.shapes, self.cluster, pace_of(self.cluster))

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        if layout is not None and devices:
            return self.predictor(job, layout, devices)
        stored = self._launch_s(job, len(job.devices)) - self.predictor.pace.launch_s
        return Move(stored, stored)

    def typical(self, job: JobView) -> float:
        if job.devices:
            return self.predictor.typical(job)
        return self._launch_s(job, job.min_devices)

    def _launch_s(self, job: JobView, num_devices: int) -> float:
        """Seconds to bring a stopped job up on `num_devices`; for one that has run, its state is read from storage."""
        pace = self.predictor.pace
        read_s = state_bytes(self.shapes[job.id]) / max(num_devices, 1) / pace.snapshot_bytes_per_s
        return pace.launch_s + (read_s if job.has_state else 0.0)


def predicted(shapes: Mapping[str, JobShape], models: Mapping[str, str], cluster: Cluster) -> PredictedMoves:
    """Moves of jobs whose `models` (job id -> model name) have `shapes` (by model name)."""
    unknown = sorted(set(models.values()) - set(shapes))
    if unknown:
        raise SpecError("move-cost", "model", f"the shapes of {unknown} are not known", "give --move-cost SECONDS")
    return PredictedMoves({job_id: shapes[model] for job_id, model in models.items()}, cluster)
