"""Emulated devices share the cores of their host: what that makes of a step.

A step takes at least its critical path, and at least the processor time of the ranks that keep to one core (a rank
keeps to the core of its device's index). Waiting for a message costs no processor time, and the other ranks of the core
fill it, but not all of it when the message comes from a rank that itself has to wait for its core. A tensor-parallel
group of tp ranks over k cores meets at every exchange; each of its ranks arrives when its core has got round to it.
With m groups on the same cores that is a closed network of m fork-joins: while one group waits for its slowest part,
cores run dry unless another group is ready, and the loss is (E[slowest of k] / mean - 1) / m. Turns on a core are about
exponential, so that E[slowest of k] / mean is the harmonic number of k; where j ranks of a group share a core, the sum
of their turns varies less, by sqrt(j).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from suika.estimate.grid import Array

CONTENTION = 8  # norm that joins the critical path and the cores' bound: near a maximum


def shared_cores_s(path_s: Array, load_s: Array) -> Array:
    """What a critical path of `path_s` gains when some core has `load_s` to do (0: each rank has its own)."""
    return np.asarray((path_s**CONTENTION + load_s**CONTENTION) ** (1 / CONTENTION) - path_s)


def load_s(work_s: Array, tp: Array, num_ranks: Array, cores: Array) -> Array:
    """Seconds that the cores need for all ranks' `work_s` if it lies on them evenly, exchanges waited for."""
    even = np.where(cores > 0, work_s / np.maximum(cores, 1e-3), 0.0)
    return np.asarray(even * (1 + rendezvous_loss(tp, num_ranks, cores)))


def rendezvous_loss(tp: Array, num_ranks: Array, cores: Array) -> Array:
    """Share by which meetings of tensor-parallel groups lengthen the work of shared cores; see the module."""
    spread = np.maximum(np.minimum(tp, np.ceil(cores)), 1.0)
    harmonic = np.cumsum(1.0 / np.arange(1, int(np.max(spread)) + 1))[spread.astype(int) - 1]
    on_a_core = tp / spread
    groups = num_ranks / (on_a_core * np.maximum(cores, 1e-3))
    return np.where(num_ranks > cores, (harmonic - 1) / np.sqrt(on_a_core) / np.maximum(groups, 1.0), 0.0)


def imbalance(stage_work_s: Sequence[float], tp: int, dp: int, devices_per_node: int, cores: float) -> float:
    """Work of the busiest core over the mean, for ranks in mesh order (dp, pp, tp) on devices in order."""
    whole = max(math.ceil(cores), 1)
    loads = [0.0] * whole
    rank = 0
    for _ in range(dp):
        for work in stage_work_s:
            for _ in range(tp):
                loads[rank % devices_per_node % whole] += work
                rank += 1
    used = min(rank, whole)
    return max(loads) / (sum(loads) / used)
