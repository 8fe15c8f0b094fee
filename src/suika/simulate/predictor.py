"""What a policy is told of a job: its curve with noise, its length as declared, noisy or not at all.

Everything is drawn from (seed, job id), so two policies hear the same of the same job.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from suika.core.errors import SpecError, require
from suika.core.snapshot import ScalingCurve
from suika.simulate.jobs import SimJob

BLIND_FLOOR_S = 60.0  # what is expected of a job that has not run yet


@dataclass(frozen=True)
class Lengths:
    """How long jobs are said to be.

    `declared`: their true steps. `noisy`: those times a lognormal factor of `sigma` (median 1), and once they are used
    up, a tenth of what was done. `blind`: as much again as was done so far (the mean residual life of a Pareto law of
    index 2), at least a minute's worth.
    """

    kind: str = "declared"
    sigma: float = 0.0

    @staticmethod
    def parse(text: str) -> Lengths:
        kind, _, number = text.partition(":")
        if kind in ("declared", "blind") and not number:
            return Lengths(kind)
        if kind == "noisy":
            try:
                sigma = float(number)
            except ValueError:
                sigma = -1.0
            require(0 < sigma < 10, "lengths", text, "noisy needs a sigma above 0", "write noisy:0.5")
            return Lengths(kind, sigma)
        raise SpecError("lengths", text, "unknown kind", "use declared, noisy:SIGMA or blind")


@dataclass(frozen=True)
class Predictor:
    lengths: Lengths = Lengths()
    noise: float = 0.0  # sigma of the lognormal factor on each option's seconds per step
    seed: int = 0
    # What is believed of a job instead of its true curve, by job id: as by a controller, see `plan.curves.known_curve`.
    told: Mapping[str, ScalingCurve] = field(default_factory=dict, hash=False, compare=False)

    @property
    def drifts(self) -> bool:
        """Whether what is said of a length changes in other ways than by steps done."""
        return self.lengths.kind != "declared"

    def curve(self, job: SimJob) -> ScalingCurve:
        if job.id in self.told:
            return self.told[job.id]
        return _noisy_curve(self, job) if self.noise else job.curve

    def remaining_steps(self, job: SimJob, done_steps: float) -> float:
        if self.lengths.kind == "declared":
            return job.num_steps - done_steps
        if self.lengths.kind == "blind":
            return max(done_steps, BLIND_FLOOR_S / job.step_s_at(job.requested_devices or job.max_devices))
        told = job.num_steps * math.exp(self.lengths.sigma * float(_rng(self.seed, "length", job.id).standard_normal()))
        return max(told - done_steps, 0.1 * max(done_steps, told * 0.1))


@cache
def _noisy_curve(predictor: Predictor, job: SimJob) -> ScalingCurve:
    rng = _rng(predictor.seed, "curve", job.id)
    factors = np.exp(predictor.noise * rng.standard_normal(len(job.curve.options)))
    options = (replace(o, step_s=o.step_s * float(f)) for o, f in zip(job.curve.options, factors, strict=True))
    return ScalingCurve(tuple(options), job.curve.version)


def _rng(seed: int, *parts: str) -> np.random.Generator:
    """A generator that depends on its name alone, not on how many were drawn before."""
    return np.random.default_rng([seed, *(zlib.crc32(part.encode()) for part in parts)])
