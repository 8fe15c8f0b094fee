"""What moves cost in simulation: a flat number of seconds, or what the redeployment planner predicts of the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from suika.core.cluster import Cluster, Device
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Move
from suika.reshard.predict import MovePredictor
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

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return self.pause_s


def predicted(shapes: Mapping[str, JobShape], models: Mapping[str, str], cluster: Cluster) -> MovePredictor:
    """Moves of jobs whose `models` (job id -> model name) have `shapes` (by model name)."""
    unknown = sorted(set(models.values()) - set(shapes))
    if unknown:
        raise SpecError("move-cost", "model", f"the shapes of {unknown} are not known", "give --move-cost SECONDS")
    return MovePredictor.of({job_id: shapes[model] for job_id, model in models.items()}, cluster)
