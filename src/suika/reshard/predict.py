"""What a move will cost, before anyone decides on it: bytes, pause, release and memory.

    pause = switch + (bytes of the most loaded link / its bandwidth) / efficiency + hashed bytes / hash rate
    release = prepare + pause

The bytes are exact (they come from the routes that the move itself would take); rates are a `Pace`. With
`weights_first` only weights move inside the pause and the rest streams behind the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from suika.core.cluster import Cluster, Device
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.core.snapshot import JobView, Move
from suika.reshard.alike import is_uniform, renumbered
from suika.reshard.assignment import assign
from suika.reshard.cells import groups_of
from suika.reshard.links import Links
from suika.reshard.moveplan import CHUNK_BYTES
from suika.reshard.routes import Demand, route
from suika.reshard.state import JobShape


@dataclass(frozen=True)
class Pace:
    """Rates of a platform. `efficiency`: share of a link's bandwidth that bulk transfers reach."""

    switch_s: float  # cut, new groups, first step of the new generation beyond a usual one
    prepare_s: float  # joiners, groups, skeletons: training goes on meanwhile
    efficiency: float
    hash_bytes_per_s: float  # per device, source and destination
    weights_first: bool
    launch_s: float  # a stopped job's processes come up
    snapshot_bytes_per_s: float  # per device, from storage
    chunk_bytes: int


# CPU: measured over gloo on one machine (docs/numbers/reshard.md). GPU: published communicator times and memory rates.
CPU = Pace(0.1, 0.3, 0.8, 2.5e9, weights_first=False, launch_s=3.0, snapshot_bytes_per_s=0.3e9, chunk_bytes=CHUNK_BYTES)
GPU = Pace(0.5, 10.0, 0.8, 1e12, weights_first=True, launch_s=30.0, snapshot_bytes_per_s=1e9, chunk_bytes=256 << 20)


def pace_of(cluster: Cluster) -> Pace:
    return CPU if all(node.device_type == "cpu" for node in cluster.nodes) else GPU


@dataclass(frozen=True)
class Prediction:
    """Exact bytes and predicted times of one move. `link_s`: the most loaded link, at full bandwidth, all bytes."""

    moved_bytes: int
    network_bytes: int
    resident_bytes: int
    worst_rank_bytes: int  # largest inbound of a device
    link_s: float
    pause_s: float
    release_s: float

    @property
    def move(self) -> Move:
        return Move(self.pause_s, self.release_s, self.moved_bytes)


def predict(shape: JobShape, old: Plan, new: Plan, cluster: Cluster, pace: Pace | None = None) -> Move:
    """The cost of moving a job from `old` to `new`; cached."""
    return predict_move(shape, old, new, cluster, pace or pace_of(cluster)).move


@lru_cache(maxsize=8192)
def predict_move(shape: JobShape, old: Plan, new: Plan, cluster: Cluster, pace: Pace) -> Prediction:
    """`predict` with everything that is known; a pure function, cached by all its arguments."""
    devices = tuple(dict.fromkeys((*old.devices, *new.devices)))
    index = {device: i for i, device in enumerate(devices)}
    links = Links(cluster, devices)
    at_old, at_new = [index[d] for d in old.devices], [index[d] for d in new.devices]
    everything: list[Demand] = []
    weights: list[Demand] = []
    held = [0] * len(devices)
    received = [0] * len(devices)
    network_bytes = resident_bytes = 0
    for group in groups_of(shape, old.layout, new.layout, old.order, new.order):
        holders, needers = tuple(at_old[r] for r in group.old), tuple(at_new[r] for r in group.new)
        everything.append(Demand(holders, needers, group.num_bytes, not group.weights))
        if group.weights:
            weights.append(everything[-1])
        for holder in holders:
            held[holder] += group.num_bytes
        holding = set(holders)
        for needer in needers:
            if needer in holding:
                resident_bytes += group.num_bytes
            else:
                received[needer] += group.num_bytes
        lacking = {links.node[n] for n in needers if n not in holding} - {links.node[h] for h in holders}
        network_bytes += group.num_bytes * len(lacking)
    load = route(everything, links, pace.chunk_bytes)[1]
    paused = route(weights, links, pace.chunk_bytes)[1] if pace.weights_first else load
    hashed = max(a + b for a, b in zip(held, received, strict=True))
    pause_s = pace.switch_s + paused.worst_s / pace.efficiency + hashed / pace.hash_bytes_per_s
    return Prediction(
        moved_bytes=sum(received),
        network_bytes=network_bytes,
        resident_bytes=resident_bytes,
        worst_rank_bytes=max(received),
        link_s=load.worst_s,
        pause_s=pause_s,
        release_s=pace.prepare_s + max(pause_s, pace.switch_s + load.worst_s / pace.efficiency),
    )


@dataclass(frozen=True)
class MovePredictor:
    """Answers `Snapshot.move_cost` for jobs whose shapes are known. The order of devices does not matter: ranks are
    placed where the fewest bytes move, as executors place them."""

    shapes: Mapping[str, JobShape]  # by job id
    cluster: Cluster
    pace: Pace

    @staticmethod
    def of(shapes: Mapping[str, JobShape], cluster: Cluster) -> MovePredictor:
        return MovePredictor(shapes, cluster, pace_of(cluster))

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        """The move of `job` to `layout` on `devices`. A job that gives up all its devices first writes its state to
        storage; a stopped one is launched, from there if it has run."""
        shape = self.shapes[job.id]
        if layout is None or not devices:
            stored_s = self._storage_s(job, len(job.devices))
            return Move(stored_s, stored_s)
        if job.devices and job.layout is not None:
            cluster, before, after = self.cluster, job.devices, devices
            if self._uniform:
                cluster, before, after = renumbered(cluster, before, after)
            return _placed_move(shape, job.layout, before, layout, after, cluster, self.pace)
        return Move(self.pace.launch_s + (self._storage_s(job, len(devices)) if job.has_state else 0.0), 0.0)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        if not job.devices or job.layout is None:
            return devices
        shape = self.shapes[job.id]
        before = Plan(job.layout.resolve(shape.model), Placement(job.devices))
        return assign(shape, before, layout.resolve(shape.model), devices, self.cluster)

    def typical(self, job: JobView) -> float:
        """Of a running job: half of its state crosses the network into as many devices as it has. Of another: its start
        on its fewest devices."""
        if not job.devices:
            return self.pace.launch_s + (self._storage_s(job, job.min_devices) if job.has_state else 0.0)
        links = Links(self.cluster, ())
        share = state_bytes(self.shapes[job.id]) / 2 / len(job.devices)
        return self.pace.switch_s + share / (links.bytes_per_s["pod"] * self.pace.efficiency)

    def _storage_s(self, job: JobView, num_devices: int) -> float:
        """Seconds in which `num_devices` write or read the job's state."""
        return state_bytes(self.shapes[job.id]) / max(num_devices, 1) / self.pace.snapshot_bytes_per_s

    @cached_property
    def _uniform(self) -> bool:
        return is_uniform(self.cluster)


@lru_cache(maxsize=8192)
def _placed_move(
    shape: JobShape,
    old: Layout,
    old_devices: tuple[Device, ...],
    new: Layout,
    new_devices: tuple[Device, ...],
    cluster: Cluster,
    pace: Pace,
) -> Move:
    """`predict` after `assign`."""
    before = Plan(old.resolve(shape.model), Placement(old_devices))
    layout = new.resolve(shape.model)
    devices = assign(shape, before, layout, new_devices, cluster)
    return predict_move(shape, before, Plan(layout, Placement(devices)), cluster, pace).move


@lru_cache(maxsize=4096)
def state_bytes(shape: JobShape) -> int:
    """Bytes of one copy of the whole state."""
    one = Layout().resolve(shape.model)
    return sum(group.num_bytes for group in groups_of(shape, one, one))
