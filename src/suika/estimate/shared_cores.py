"""Emulated devices share the cores of their host: what that makes of a step.

A step takes at least its critical path, and at least the processor time of the ranks that keep to one core (a rank
keeps to the core of its device's index). Waiting for a message costs no processor time, and the other ranks of the core
fill it, as long as one of them is ready. How often none is, is that of a closed queueing network whose turns on a core
are about exponential (ranks come round at any moment of each other's):

- A tensor-parallel group over k cores meets at every exchange, and each of its ranks arrives when its core has got
  round to it. With m groups ready on the same cores these are m fork-joins: the loss is (slowest of k / mean - 1) / m,
  and the slowest of k takes the harmonic number of k on average. Where j ranks of a group share a core, the sum of
  their turns varies less, by sqrt(j).
- Micro-batches of a pipeline whose stages keep to different cores go from core to core. N of them in flight over k
  cores keep each core busy for N / (N + k - 1) of the time. The same law says how many stages of a pipeline are ready.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from suika.estimate.columns import Array

CONTENTION = 8  # norm that joins the critical path and the cores' bound: near a maximum


def shared_cores_s(path_s: Array, load_s: Array) -> Array:
    """What a critical path of `path_s` gains when some core has `load_s` to do (0: each rank has its own)."""
    return np.asarray((path_s**CONTENTION + load_s**CONTENTION) ** (1 / CONTENTION) - path_s)


def load_s(work_s: Array, tp: Array, pp: Array, dp: Array, num_micro: Array, cores: Array) -> Array:
    """Seconds that the cores need for all ranks' `work_s` if it lies on them evenly, waits that nobody fills included.
    `dp`: replicas, context-parallel ranks among them; `num_micro`: micro-batches of each."""
    even = np.where(cores > 0, work_s / np.maximum(cores, 1e-3), 0.0)
    return np.asarray(even * (1 + idle_share(tp, pp, dp, num_micro, cores)))


def idle_share(tp: Array, pp: Array, dp: Array, num_micro: Array, cores: Array) -> Array:
    """Idle time of shared cores over their work; see the module. 0 where no core is shared."""
    whole = np.maximum(np.ceil(cores), 1.0)
    spread = np.maximum(np.minimum(tp, whole), 1.0)
    harmonic = np.cumsum(1.0 / np.arange(1, int(np.max(spread)) + 1))[spread.astype(int) - 1]
    in_flight = np.minimum(pp, num_micro)
    ready = dp * pp * spread / whole * in_flight / (in_flight + pp - 1)
    meetings = (harmonic - 1) / np.sqrt(tp / spread) / np.maximum(ready, 1.0)
    hops = (np.minimum(pp, whole / spread) - 1) / (dp * in_flight)
    shared = (cores > 0) & (tp * pp * dp > cores)
    return np.where(shared, meetings + np.maximum(hops, 0.0), 0.0)


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
