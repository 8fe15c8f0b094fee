"""Worlds that a controller may run in: the real one, and an emulated one whose seconds are shorter.

An emulated world has a clock that runs `speedup` times as fast, prices from a table of measured iteration times (or the
estimator's), jobs without data, and agents whose processes are acted out (`suika agent --emulate`). Controller, store,
messages and leases are the real ones; what an agent's process tells in real seconds is told on in emulated ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

from suika.agent.emulated_job import MovePrice
from suika.control.adopt import AgentLauncher
from suika.control.clock import SteadyClock
from suika.control.compute import Compute, compute_here
from suika.control.roster import GrowingPricing
from suika.control.state import Clock
from suika.control.views import Pricing
from suika.core.cluster import Cluster, Node
from suika.core.errors import require
from suika.core.job import Job, JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.redeployment import Redeployment
from suika.core.snapshot import Option, ScalingCurve
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known
from suika.plan.curves import slowed
from suika.reshard.predict import pace_of, predict_move, state_bytes
from suika.reshard.state import JobShape
from suika.runtime.command_run import CommandRun
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Ended, JobEvent, Measured, Moving, Snapshotted, Started, StepDone
from suika.runtime.rooms import FRACTION
from suika.simulate.times import Models, measured


class World(Protocol):
    """What differs between a cluster of devices and an emulated one."""

    name: str  # of the kind of world
    speedup: float  # seconds of `clock` per real second

    def clock(self, folder: Path) -> Clock:
        """Goes on where it was, over restarts, for the controller whose state lies in `folder`."""
        ...

    def pricing(self, cluster: Cluster, compute: Compute = compute_here) -> GrowingPricing: ...

    def launcher(self, folder: Path) -> AgentLauncher: ...

    def agents(self, nodes: Sequence[Node]) -> Sequence[Agents]:
        """The agent processes of a cluster on this machine."""
        ...


class Agents(NamedTuple):
    """One agent process: its folder below `agents/`, the nodes that it serves, and its options beyond the common."""

    folder: str
    nodes: tuple[Node, ...]
    options: tuple[str, ...]


class Real:
    """Devices as they are. `cores`: processor cores that all `cpu` devices share, if they are on this machine."""

    name, speedup = "real", 1.0

    def __init__(self, cores: int = 0) -> None:
        self.cores = cores

    def clock(self, folder: Path) -> Clock:
        return SteadyClock()

    def pricing(self, cluster: Cluster, compute: Compute = compute_here) -> GrowingPricing:
        return GrowingPricing(cluster, self.cores, compute)

    def launcher(self, folder: Path) -> AgentLauncher:
        return AgentLauncher(folder)

    def agents(self, nodes: Sequence[Node]) -> Sequence[Agents]:
        part = FRACTION / len(nodes)  # they share this machine's memory
        return [Agents(node.name, (node,), (*_options(node), "--copies-memory", str(part))) for node in nodes]


def _options(node: Node) -> tuple[str, ...]:
    named = ("--name", node.name, "--devices", f"cpu:{node.num_devices}", "--type", node.device_type)
    return (*named, "--domain-size", str(node.domain_size), "--rack", node.rack, "--pod", node.pod)


@dataclass(frozen=True)
class Emulated:
    """`cluster`: as on the command line, NODESxDEVICES:TYPE or a file. `times`: a table of measured iteration times
    (docs/design/simulate.md); None: the estimator prices steps."""

    cluster: str
    speedup: float
    times: Path | None = None
    name: str = field(default="emulated", init=False)

    def clock(self, folder: Path) -> Clock:
        """Emulated seconds since the epoch of the folder's first start, plus that epoch."""
        kept = folder / "emulation.json"
        if not kept.exists():
            draft = kept.with_suffix(".tmp")
            draft.write_text(json.dumps({"began_s": time.time(), "speedup": self.speedup}))
            draft.rename(kept)
        began = json.loads(kept.read_text())
        same = began["speedup"] == self.speedup
        require(same, "speedup", self.speedup, f"this cluster began with {began['speedup']:g}", "use that one")
        began_s, speedup, real = float(began["began_s"]), self.speedup, SteadyClock()
        return lambda: began_s + (real() - began_s) * speedup

    def pricing(self, cluster: Cluster, compute: Compute = compute_here) -> GrowingPricing:
        if self.times is not None:
            return TablePricing(cluster, measured(self.times), compute)
        return GrowingPricing(cluster, compute=compute)

    def launcher(self, folder: Path) -> AgentLauncher:
        return EmulatedLauncher(folder, self.speedup)

    def agents(self, nodes: Sequence[Node]) -> Sequence[Agents]:
        times = ("--times", str(self.times)) if self.times is not None else ()
        return [Agents("", tuple(nodes), ("--emulate", self.cluster, "--speedup", str(self.speedup), *times))]


class TablePricing(GrowingPricing):
    """Step times from a table, by the model's name; moves as ever."""

    def __init__(self, cluster: Cluster, models: Models, compute: Compute) -> None:
        super().__init__(cluster, compute=compute)
        self._models = models

    def _make_curve(self, spec: JobSpec, known: tuple[Known, ...]) -> ScalingCurve:
        table = self._models.curve(spec.model.name).options
        low, high = spec.devices.min, spec.devices.max
        options = tuple(self._resolved(option, spec) for option in table if low <= option.num_devices <= high)
        wanted = spec.layout
        if wanted != "auto":
            options = tuple(option for option in options if option.layout == wanted.resolve(spec.model))
        return slowed(ScalingCurve(options), {k.device_type: k.pace for k in known if k.pace is not None})

    def _resolved(self, option: Option, spec: JobSpec) -> Option:
        wanted = spec.devices.type
        kind = next(iter(self.cluster.types_named(wanted)), wanted) if wanted else ""
        return replace(option, layout=option.layout.resolve(spec.model), device_type=kind)

    def _make_step_s(
        self, spec: JobSpec, layout: Layout, device_type: str, shape: tuple[int, ...], calibration: Calibration | None
    ) -> float:
        table = self._models.curve(spec.model.name).options
        found = [o.step_s for o in table if o.shape == shape and o.layout.resolve(spec.model) == layout]
        require(bool(found), "plan", str(layout), f"has no measured time on {shape}")
        return found[0]


class EmulatedPrices:
    """What emulated ranks take, by the same prices as the controller's and the simulator's."""

    def __init__(self, pricing: Pricing, cluster: Cluster) -> None:
        self._pricing, self._cluster, self._pace = pricing, cluster, pace_of(cluster)

    def step_s(self, spec: JobSpec, plan: Plan) -> float:
        return self._pricing.step_s(spec, plan)

    def launch_s(self, spec: JobSpec, plan: Plan, resumed: bool) -> float:
        return self._pace.launch_s + (self.save_s(spec, plan) if resumed else 0.0)

    def save_s(self, spec: JobSpec, plan: Plan) -> float:
        return state_bytes(JobShape.of(spec)) / len(plan.devices) / self._pace.snapshot_bytes_per_s

    def move(self, spec: JobSpec, old: Plan, new: Plan) -> MovePrice:
        found = predict_move(JobShape.of(spec), old, new, self._cluster, self._pace)
        leave_s = found.release_s - self._pace.prepare_s
        return MovePrice(self._pace.prepare_s, found.pause_s, leave_s, found.moved_bytes, found.network_bytes)


class EmulatedLauncher(AgentLauncher):
    """Jobs without data, whose reports are told in emulated seconds."""

    def __init__(self, folder: Path, speedup: float) -> None:
        super().__init__(folder)
        self._speedup = speedup

    def prepare(self, job: Job) -> Path:
        return Path(job.spec.data)

    def run(self, job: Job, data: Path, on_event: Callable[[JobEvent], None]) -> JobRun | CommandRun:
        return super().run(job, data, lambda event: on_event(slower(event, self._speedup)))


def slower(event: JobEvent, factor: float) -> JobEvent:
    """`event` with all its seconds multiplied by `factor`."""
    match event:
        case StepDone():
            return replace(event, at_s=event.at_s * factor)
        case Started():
            return replace(event, launch_s=event.launch_s * factor)
        case Snapshotted():
            return replace(event, stall_s=event.stall_s * factor)
        case Ended():
            return replace(event, noticed_s=event.noticed_s * factor)
        case Moving() | Measured():
            return replace(event, record=_slower(event.record, factor))
    return event


def _slower(record: Redeployment, factor: float) -> Redeployment:
    def times(seconds: float | None) -> float | None:
        return None if seconds is None else seconds * factor

    return replace(
        record,
        pause_s=times(record.pause_s),
        prepare_lost_s=record.prepare_lost_s * factor,
        total_s=times(record.total_s),
        phase_s={phase: seconds * factor for phase, seconds in record.phase_s.items()},
    )
