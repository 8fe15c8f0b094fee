"""Calibration: what measured steps say about the factors of a device type and of one job, as a Gaussian in log space.

Prior: each op class's log factor has mean 0 and the standard deviation of `factors.PRIOR_SD`; one more term, `job`,
scales the whole step (sd 0.1: framework version, clocks). A measured step time z = log(measured / predicted) is one
linear observation with slopes J (the classes' shares of the step); a measured component observes its class directly.
Both are Kalman updates: few or noisy samples stay near the prior, many precise ones replace it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from suika.core.device_names import canonical
from suika.core.errors import SpecError
from suika.estimate.columns import Array
from suika.estimate.factors import OP_CLASSES, PRIOR_SD
from suika.estimate.grid import Grid
from suika.estimate.step import price

TERMS = (*OP_CLASSES, "job")
JOB_SD = 0.10
ROW_SD = 0.08  # of log(step time) between two runs of one layout, and what the model's form leaves over
# From the middle to p10 and p90, in standard deviations. A Gaussian's would be 1.28: errors of predictions have heavier
# tails, hence four fifths of them lie closer to the middle (docs/numbers/estimate.md).
HALF_WIDTH = 0.96
DOUBT = 1.5  # a surprise of more standard deviations than this counts as this many
TRAFFIC = ("tp", "cp", "ep", "p2p", "dp", "network")
CPU_JOB_SD, CPU_TRAFFIC_SD = 0.5, 0.7
STEP = 1e-4
VERSION = 1


def prior_covariance(device_type: str = "") -> Array:
    """Of a job on hardware that the catalog knows. Of a CPU device it knows little: its speed (which all classes share)
    and what a message costs."""
    if canonical(device_type) == "cpu":
        return np.diag([(CPU_TRAFFIC_SD if c in TRAFFIC else PRIOR_SD[c]) ** 2 for c in OP_CLASSES] + [CPU_JOB_SD**2])
    return np.diag([PRIOR_SD[c] ** 2 for c in OP_CLASSES] + [JOB_SD**2])


def slopes(grid: Grid, log: Mapping[str, float] | None = None) -> tuple[Array, Array]:
    """(step_s (N,), J (N, terms)): step time of every row and its log-slope in each term."""
    at = {c: float((log or {}).get(c, 0.0)) for c in OP_CLASSES}
    base = np.atleast_1d(price(grid, at).step_s)
    columns = [(np.log(price(grid, at | {c: at[c] + STEP}).step_s) - np.log(base)) / STEP for c in OP_CLASSES]
    return base, np.stack([*np.broadcast_arrays(base, *columns)[1:], np.ones_like(base)], axis=-1)


@dataclass(frozen=True, eq=False)
class Calibration:
    """Mean and covariance of the log factors, and where they come from. Immutable: `observe` returns the next one.
    Compared by identity, as what is priced by it is kept under it."""

    device_type: str
    mean: Array
    covariance: Array
    num_samples: int = 0
    version: int = 0  # changes exactly when the numbers do
    job: str = ""

    @staticmethod
    def prior(device_type: str, job: str = "") -> Calibration:
        return Calibration(device_type, np.zeros(len(TERMS)), prior_covariance(device_type), job=job)

    @property
    def log_factors(self) -> dict[str, float]:
        """Op class -> log factor to price with; the job's term scales every class alike."""
        return {c: float(self.mean[i] + self.mean[-1]) for i, c in enumerate(OP_CLASSES)}

    @property
    def sd(self) -> dict[str, float]:
        return dict(zip(TERMS, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))

    def sigma(self, shares: Array) -> Array:
        """Standard deviation of log(step time) for rows with slopes `shares` (N, terms)."""
        return np.sqrt(np.einsum("nk,kl,nl->n", shares, self.covariance, shares) + ROW_SD**2)

    def observe(self, slope: Array, surprise: float, sd: float, weight: int = 1) -> Calibration:
        """After one observation: `surprise` = log(measured / predicted with the present mean), of standard deviation
        `sd`, with slopes `slope` in the terms."""
        if not math.isfinite(surprise):
            raise SpecError("sample", surprise, "is not a finite time", "drop the sample")
        gain = self.covariance @ slope
        variance = float(slope @ gain) + sd**2
        bounded = math.copysign(min(abs(surprise), DOUBT * math.sqrt(variance)), surprise)
        mean = self.mean + gain * bounded / variance
        covariance = self.covariance - np.outer(gain, gain) / variance
        return Calibration(self.device_type, mean, covariance, self.num_samples + weight, self.version + 1, self.job)

    def observe_step(self, grid: Grid, measured_s: float, sd: float = ROW_SD) -> Calibration:
        """After a measured step time of the layout in `grid` (one row)."""
        predicted, shares = slopes(grid, self.log_factors)
        return self.observe(shares[0], math.log(measured_s / predicted[0]), sd)

    def observe_class(self, op_class: str, log_ratio: float, sd: float) -> Calibration:
        """After a component's time: `log_ratio` = log(measured / predicted by the prior) of one op class."""
        slope = np.zeros(len(TERMS))
        slope[TERMS.index(op_class)] = slope[-1] = 1.0
        return self.observe(slope, log_ratio - float(slope @ self.mean), sd)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": VERSION,
            "device_type": self.device_type,
            "job": self.job,
            "version": self.version,
            "num_samples": self.num_samples,
            "terms": list(TERMS),
            "mean": self.mean.tolist(),
            "covariance": self.covariance.tolist(),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Calibration:
        if data.get("format") != VERSION or tuple(data.get("terms", ())) != TERMS:
            raise SpecError("calibration", data.get("format"), "was written by another version", "measure again")
        return Calibration(
            data["device_type"],
            np.array(data["mean"]),
            np.array(data["covariance"]),
            data["num_samples"],
            data["version"],
            data["job"],
        )

    def table(self) -> list[dict[str, Any]]:
        """One row per term, for people: factor on the time, and its 80 % interval."""
        rows = []
        for name, mean, sd in zip(TERMS, self.mean, self.sd.values(), strict=True):
            low, high = math.exp(mean - 1.2816 * sd), math.exp(mean + 1.2816 * sd)
            rows.append({"op_class": name, "factor": math.exp(mean), "p10": low, "p90": high})
        return rows


VERSION_SD = 0.05  # part of JOB_SD that another version of the same software draws anew
FORM_SD = 0.06  # of log(step time), for what the model's form gets wrong about one layout
FORM_REACH = 1.5  # doublings of degrees and micro-batches over which that is still about the same error


def form_covariance(places: Array) -> Array:
    """(N, N): what the form gets wrong about layouts at `places` (N, axes; doublings): alike where they are alike."""
    apart = ((places[:, None] - places[None]) ** 2).sum(axis=-1)
    return np.asarray(FORM_SD**2 * np.exp(-0.5 * apart / FORM_REACH**2))


def updated(
    rows: Sequence[int], surprises: Array, shares: Array, places: Array, versions: Array
) -> tuple[Array, Array]:
    """Linear update of all N rows of one job by its measured `rows`: (expected surprise (N,), its variance (N,)).

    A row learns what it shares with the measured ones: op classes by its `shares`, and the form's error by how near its
    layout is (`places`, as `form_covariance`). Another of the software's `versions` has part of the job's term anew.
    """
    k = shares @ prior_covariance() @ shares.T + form_covariance(places)
    k -= VERSION_SD**2 * (versions[:, None] != versions[None])
    seen = np.asarray(rows)
    noise = k[np.ix_(seen, seen)] + ROW_SD**2 * np.eye(len(seen))
    solve = np.linalg.solve(noise, k[seen])
    bound = DOUBT * np.sqrt(np.diag(noise))
    variance = np.diag(k) - np.einsum("in,in->n", k[seen], solve) + ROW_SD**2
    return solve.T @ np.clip(surprises[seen], -bound, bound), variance
