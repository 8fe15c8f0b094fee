"""Decision time, charged in simulation by a formula, so that a simulation can be replayed exactly.

`suika bench charge` fits such constants to the medians of `suika bench decide` and shows these beside the fit: a whole
decision takes about BASE_S + PER_JOB_S x jobs + PER_DEVICE_S x devices. Every policy is charged the same.
"""

from __future__ import annotations

BASE_S = 3.0e-3
PER_JOB_S = 1.5e-5
PER_DEVICE_S = 9.0e-7


def decision_s(num_devices: int, num_jobs: int) -> float:
    """Seconds that a decision is taken to last; added to the pause of each job that it changes."""
    return BASE_S + PER_JOB_S * num_jobs + PER_DEVICE_S * num_devices
