"""What is known of a command's price: how long its user expects it to run. It is not moved but stopped and started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from suika.core.cluster import Cluster, Device
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Move, MoveCost, Option, ScalingCurve
from suika.plan.curves import shapes_of

RESTART_S = 60.0  # of a command, until it is where it was stopped: imports, data, its own checkpoint
LEAST_LEFT = 0.05  # part of a command that is always taken to be left: its length is a guess


@lru_cache(maxsize=4096)
def command_curve(cluster: Cluster, num_devices: int, run_s: float, device_type: str | None) -> ScalingCurve:
    """One step of `run_s` on any nodes of one type that hold the gang."""
    layout, options = Layout(dp=num_devices, layers_per_stage=(1,)), []
    types = {node.device_type for node in cluster.nodes}
    for name in sorted(types if device_type is None else cluster.types_named(device_type)):
        sizes = sorted((node.num_devices for node in cluster.nodes if node.device_type == name), reverse=True)
        options += [Option(shape, layout, run_s, name) for shape in shapes_of(num_devices, sizes)]
    return ScalingCurve(tuple(options))


def part_left(expected_s: float, run_s: float) -> float:
    """Of a command's one step, by how long it has run since its last start: what it did before may be saved or not."""
    return max(1.0 - run_s / expected_s, LEAST_LEFT)


@dataclass(frozen=True)
class MovesWithCommands:
    """Training jobs move as `moves` predicts. A command, whose id is in `graces`, is stopped: its devices are free when
    the grace (seconds) is over at the latest, and it starts anew, from a checkpoint that we know nothing of."""

    moves: MoveCost
    graces: Mapping[str, float]

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        if job.id not in self.graces:
            return self.moves(job, layout, devices)
        grace_s = self.graces[job.id] if job.devices else 0.0
        return Move(grace_s + (RESTART_S if devices else 0.0), grace_s)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices if job.id in self.graces else self.moves.place(job, layout, devices)

    def typical(self, job: JobView) -> float:
        if job.id not in self.graces:
            return self.moves.typical(job)
        return RESTART_S + (self.graces[job.id] if job.devices else 0.0)
