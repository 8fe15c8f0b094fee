"""The devices of the simulated cluster: who holds each, when it can be had, how long steps take on it."""

from __future__ import annotations

from collections import Counter

import numpy as np

from suika.core.cluster import Cluster, Device
from suika.plan.ordering import fabric
from suika.simulate.live import LiveJob
from suika.simulate.world import Failure, Slowdown

FREE, DOWN = -1, -2  # in `owner`
SEEN = 1.5  # times as long as its peers: less is not told apart from noise, as by the live profiler


class Devices:
    """D devices by position in walk order. `owner` [D] is a job's number, FREE or DOWN."""

    def __init__(self, cluster: Cluster, num_jobs: int) -> None:
        self.cluster = cluster
        self.fabric = fabric(cluster)
        self.owner = np.full(self.fabric.num_devices, FREE, dtype=np.int64)
        self.num_held = np.zeros(num_jobs, dtype=np.int64)  # by job number: what `owner` must add up to
        self.releasing: dict[int, float] = {}  # position -> usable from that time on
        self.times = np.ones(self.fabric.num_devices)  # [D] as long as a step takes on sound devices
        self.seen_slow: set[int] = set()  # positions that a job's samples have shown to be slow, until they are sound
        self._slowdowns: list[Slowdown] = []  # at present

    # -- who holds them ----------------------------------------------------------------------------------------------

    def give(self, live: LiveJob, positions: np.ndarray) -> np.ndarray:
        """Give the job exactly `positions`; returns those that it gives up."""
        gives_up = np.setdiff1d(live.positions, positions)
        self.owner[live.positions] = FREE
        taken = self.owner[positions] != FREE
        assert not taken.any(), f"{live.job.id} takes {self.fabric.devices[positions[taken][0]]}, which is not free"
        self.owner[positions] = live.number
        self.num_held[live.number] = len(positions)
        live.positions = positions
        return gives_up

    def count(self) -> np.ndarray:
        """How many each job holds by `owner`, by its number."""
        return np.bincount(self.owner[self.owner >= 0], minlength=len(self.num_held))

    def jobs_on(self, here: np.ndarray) -> list[int]:
        """Numbers of the jobs that hold some of `here`, a mask [D]; ascending."""
        return sorted({int(owner) for owner in self.owner[here] if owner >= 0})

    # -- when they can be had ----------------------------------------------------------------------------------------

    def release_at(self, positions: np.ndarray, usable_s: float) -> None:
        self.releasing.update(dict.fromkeys(positions.tolist(), usable_s))

    def released(self, positions: np.ndarray, now_s: float) -> None:
        for position in positions.tolist():
            if self.releasing.get(position, now_s + 1) <= now_s:
                del self.releasing[position]

    def fail(self, here: np.ndarray) -> None:
        self.owner[here] = DOWN

    def repair(self, here: np.ndarray) -> None:
        self.owner[here & (self.owner == DOWN)] = FREE

    # -- how long steps take -----------------------------------------------------------------------------------------

    def slow_down(self, slowdown: Slowdown) -> None:
        self._slowdowns.append(slowdown)
        self._set_times(slowdown)

    def heal(self, slowdown: Slowdown) -> None:
        self._slowdowns.remove(slowdown)
        self._set_times(slowdown)

    def _set_times(self, changed: Slowdown) -> None:
        here = self.under(changed)
        self.times[here] = 1.0
        for other in self._slowdowns:
            there = here & self.under(other)
            self.times[there] = np.maximum(self.times[there], other.times)
        self.seen_slow -= set(np.flatnonzero(self.times < SEEN).tolist())

    def sample(self, positions: np.ndarray) -> None:
        """A job runs on them: its samples show which are slow."""
        self.seen_slow.update(positions[self.times[positions] >= SEEN].tolist())

    def true_rate(self, live: LiveJob) -> float:
        """Steps/s of the job in its layout where it stands, as slow as its slowest device."""
        per_node = Counter(self.fabric.node_of[live.positions].tolist())
        shape = tuple(sorted(per_node.values(), reverse=True))
        assert live.layout is not None
        kinds = {self.cluster.nodes[node].device_type for node in per_node}
        assert len(kinds) == 1, f"{live.job.id} stands on devices of several types: {sorted(kinds)}"
        known = live.job.true_step_s
        step_s = known.get((shape, live.layout, kinds.pop()), known.get((shape, live.layout, "")))
        assert step_s is not None, f"{live.job.id}: {live.layout} on {shape} is not an option of it"
        return 1.0 / (step_s * float(self.times[live.positions].max()))

    # -- which they are ----------------------------------------------------------------------------------------------

    def under(self, fault: Failure | Slowdown) -> np.ndarray:
        """[D] mask of the devices that it is about."""
        node = self.fabric.node_number[fault.node]
        here: np.ndarray = self.fabric.node_of == node
        if fault.index is not None:
            here = here & (np.arange(len(here)) == self.fabric.first[node] + fault.index)
        return here

    def positions_of(self, devices: tuple[Device, ...]) -> np.ndarray:
        position = self.fabric.position
        return np.array([position[device] for device in devices], dtype=np.int64)

    def at(self, positions: np.ndarray) -> tuple[Device, ...]:
        return tuple(self.fabric.devices[p] for p in positions.tolist())

    # -- what policies see of them -----------------------------------------------------------------------------------

    @property
    def down(self) -> frozenset[Device]:
        return frozenset(self.at(np.flatnonzero(self.owner == DOWN)))

    @property
    def promised(self) -> dict[Device, float]:
        """Those that nobody holds but cannot be had yet, with the time from which on they can."""
        return {self.fabric.devices[p]: at_s for p, at_s in self.releasing.items() if self.owner[p] == FREE}

    @property
    def slow(self) -> dict[Device, float]:
        return {self.fabric.devices[p]: float(self.times[p]) for p in sorted(self.seen_slow)}
