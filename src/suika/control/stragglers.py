"""Devices that are slower than their peers, by live samples: a rank that the others wait for in every step.

Ranks of one pipeline stage do the same work, so each is held against the others of its stage. In a step that all end
together the slow rank shows in what it does *itself*: in its seconds outside of collectives and transfers (where the
others wait), and in its seconds of computing. A rank counts as slow when its median of one of the two is
`SLOW` times the median of its peers', by more than the noise of all of them explains (median absolute deviation), at
`LOOKS` looks in a row; it counts as well again below `WELL`. One slow step, a busy moment or a noisy machine is no
straggler, and a job whose ranks all slow down has none.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from suika.core.cluster import Device
from suika.core.mesh import Mesh
from suika.core.plan import Plan
from suika.core.sample import StepSample

SLOW, WELL = 1.5, 1.2  # times the peers' median
LOOKS = 5  # in a row: more than half of the samples are others by then
LEAST_SAMPLES = 5  # of each rank
NOISE = 5.0  # standard errors of a median, by which a slow rank must differ
_TO_SIGMA = 1.4826  # of a median absolute deviation, to a standard deviation
_OF_MEDIAN = 1.2533  # standard error of a median, in standard errors of a mean
_WAITS = ("tp", "pp", "dp", "cp", "ep", "world", "rest")  # classes that hold waiting, or what nobody has named


def own_wall_s(sample: StepSample) -> float:
    """Seconds of the step outside of collectives and transfers, and of waiting for them."""
    messages_s = sum(c.duration_s for c in sample.collectives if c.group_size > 1)
    return max(sample.step_s - sample.waited_s - messages_s, 0.0)


def computing_s(sample: StepSample) -> float:
    return sum(seconds for name, seconds in sample.op_s.items() if name not in _WAITS)


MEASURES: tuple[Callable[[StepSample], float], ...] = (own_wall_s, computing_s)


def slowness(samples: Mapping[int, Sequence[StepSample]], mesh: Mesh) -> dict[int, float]:
    """How many times as long as its peers a rank takes, of ranks that differ from them beyond noise."""
    found: dict[int, float] = {}
    for stage in range(mesh.layout.pp):
        ranks = [rank for rank in samples if mesh.coordinate(rank).pp == stage]
        for measure in MEASURES:
            for rank, times in _beyond_noise({r: [measure(s) for s in samples[r]] for r in ranks}).items():
                found[rank] = max(times, found.get(rank, 0.0))
    return found


def _beyond_noise(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """`seconds` by rank, all doing the same."""
    if len(seconds) < 2:
        return {}
    medians = {rank: statistics.median(values) for rank, values in seconds.items()}
    deviations = [abs(value - medians[rank]) for rank, values in seconds.items() for value in values]
    sigma_s = _TO_SIGMA * statistics.median(deviations)
    found = {}
    for rank, values in seconds.items():
        peers_s = statistics.median(median for other, median in medians.items() if other != rank)
        error_s = _OF_MEDIAN * sigma_s / math.sqrt(len(values))
        often = statistics.quantiles(values, n=4)[0] > peers_s  # not by a few long steps
        if peers_s > 0 and often and medians[rank] - peers_s > NOISE * error_s:
            found[rank] = medians[rank] / peers_s
    return found


@dataclass
class Stragglers:
    """Of one job's present generation. `slow`: devices that count as slow, with how many times as long they take."""

    slow: dict[Device, float] = field(default_factory=dict)
    _seen: int = 0  # samples at the last look
    _in_a_row: dict[Device, int] = field(default_factory=dict)

    def clear(self) -> None:
        self.slow, self._seen, self._in_a_row = {}, 0, {}

    def look(
        self, plan: Plan, by_rank: Mapping[int, Iterable[StepSample]], num_samples: int
    ) -> list[tuple[Device, float]]:
        """What has changed since the last look: (device, times as long), or (device, 0) for one that is well again.

        Looks once for each new sample of all ranks."""
        devices = plan.devices
        if num_samples - self._seen < len(devices):
            return []
        self._seen = num_samples
        samples = {rank: tuple(found) for rank, found in by_rank.items() if rank < len(devices)}
        if len(samples) < len(devices) or min(map(len, samples.values())) < LEAST_SAMPLES:
            return []
        times = slowness(samples, plan.mesh)
        changes = [self._judge(device, times.get(rank, 1.0)) for rank, device in enumerate(devices)]
        return [change for change in changes if change is not None]

    def _judge(self, device: Device, times: float) -> tuple[Device, float] | None:
        was_slow = device in self.slow
        against = times < WELL if was_slow else times >= SLOW
        self._in_a_row[device] = self._in_a_row.get(device, 0) + 1 if against else 0
        if was_slow and not against:
            self.slow[device] = times
        if self._in_a_row[device] < LOOKS:
            return None
        self._in_a_row[device] = 0
        if was_slow:
            del self.slow[device]
            return device, 0.0
        self.slow[device] = times
        return device, times
