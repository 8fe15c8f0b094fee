"""What moves cost in simulation: a flat number of seconds, or a model of the bytes."""

from __future__ import annotations

from dataclasses import dataclass

from suika.core.cluster import Device
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Move


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
