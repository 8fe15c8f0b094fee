"""What measured steps have taught about one job on one device type, and what all jobs of a type teach about the next.

`Seen` is one layout's steady samples, summed up: the evidence. `Known` is what follows from it: the calibration, and
the pace, the factor between measured and predicted steps that the calibration leaves. Both are plain, immutable and
JSON, so that they can be stored, shown and derived again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.sample import StepSample
from suika.estimate.calibrate import TERMS, Calibration, prior_covariance
from suika.estimate.columns import Array
from suika.estimate.predict import Setting
from suika.estimate.samples import calibrate_parts, measured_parts, steady

FORMAT = 1
LAYOUTS_KEPT = 6  # of one job: the newest
NOTICEABLE = 0.1  # |log| by which a part's time, a factor or the pace must move before prices are made anew
BETWEEN_JOBS = 0.5  # share of the prior's variance by which two jobs of one device type differ


@dataclass(frozen=True)
class Seen:
    """Steady samples of one layout. `parts_s`: seconds of work per rank and step, as `samples.measured_parts`."""

    layout: Layout
    devices_per_node: int
    parts_s: Mapping[str, float]
    num_samples: int

    @staticmethod
    def of(mesh: Mesh, devices_per_node: int, global_batch: int, samples: Iterable[StepSample]) -> Seen | None:
        """None unless some sample is steady and has component times."""
        kept = [sample for sample in steady(samples) if sample.op_s]
        if not kept:
            return None
        return Seen(mesh.layout, devices_per_node, measured_parts(kept, mesh, global_batch), len(kept))

    def differs(self, other: Seen) -> bool:
        """Whether the times are noticeably others (only parts that were measured in both are compared)."""
        pairs = [(self.parts_s[p], other.parts_s[p]) for p in self.parts_s if p in other.parts_s]
        return any(abs(math.log(a / b)) > NOTICEABLE for a, b in pairs if a > 0 and b > 0)

    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout.to_dict(),
            "devices_per_node": self.devices_per_node,
            "parts_s": dict(self.parts_s),
            "num_samples": self.num_samples,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Seen:
        layout = Layout.from_dict(data["layout"])
        return Seen(layout, data["devices_per_node"], data["parts_s"], data["num_samples"])


@dataclass(frozen=True, eq=False)
class Known:
    """Compared by identity: as long as nothing noticeable was learned it stays the same object, and so do prices.

    `base` is what the calibration began with: what other jobs had taught about the type. `pace` is None until a step
    time was measured.
    """

    calibration: Calibration
    base: Calibration
    seen: tuple[Seen, ...] = ()
    pace: float | None = None

    @staticmethod
    def nothing(base: Calibration, job: str = "") -> Known:
        base = replace(base, job=job, num_samples=0, version=0)
        return Known(base, base)

    @property
    def device_type(self) -> str:
        return self.calibration.device_type

    def with_seen(self, seen: Seen, setting: Mapping[int, Setting]) -> Known:
        """After `seen`, which replaces what was seen of the same layout. `setting` by devices per node."""
        others = [s for s in self.seen if (s.layout, s.devices_per_node) != (seen.layout, seen.devices_per_node)]
        kept = (*others, seen)[-LAYOUTS_KEPT:]
        calibration = derived(self.base, kept, setting)
        return replace(self, calibration=replace(calibration, version=self.calibration.version + 1), seen=kept)

    def news(self, seen: Seen) -> bool:
        """Whether `seen` would change prices noticeably."""
        known = [s for s in self.seen if (s.layout, s.devices_per_node) == (seen.layout, seen.devices_per_node)]
        return not known or seen.differs(known[0])

    def paced(self, pace: float) -> Known:
        """At the new pace, or unchanged where that is no news."""
        if not math.isfinite(pace) or pace <= 0:
            raise SpecError("pace", pace, "is not a positive number", "drop the measurement")
        if self.pace is not None and abs(math.log(pace / self.pace)) <= NOTICEABLE:
            return self
        return replace(self, pace=pace)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "calibration": self.calibration.to_dict(),
            "base": self.base.to_dict(),
            "seen": [s.to_dict() for s in self.seen],
            "pace": self.pace,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Known:
        """Raises `SpecError` for what another version wrote."""
        if data.get("format") != FORMAT:
            raise SpecError("calibration", data.get("format"), "was written by another version", "measure again")
        calibration, base = (Calibration.from_dict(data[key]) for key in ("calibration", "base"))
        return Known(calibration, base, tuple(Seen.from_dict(s) for s in data["seen"]), data["pace"])


def derived(base: Calibration, seen: Sequence[Seen], setting: Mapping[int, Setting]) -> Calibration:
    """`base` after every layout that was seen, each counted once whatever the number of its samples."""
    for s in seen:
        base = calibrate_parts(base, setting[s.devices_per_node], s.layout, s.parts_s, s.num_samples)
    return base


@dataclass(frozen=True)
class Pool:
    """What the jobs of one device type have taught together: where a job begins that was never measured."""

    calibration: Calibration
    pace: float | None = None
    known: Known = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "known", Known(self.calibration, self.calibration, pace=self.pace))

    @staticmethod
    def of(device_type: str, jobs: Sequence[Known]) -> Pool:
        """Each job's evidence (what its calibration has beyond its base) counts as one draw around the type's mean."""
        between = BETWEEN_JOBS * prior_covariance(device_type)
        eye = np.eye(len(TERMS))
        precision, information = np.linalg.inv((1 - BETWEEN_JOBS) * prior_covariance(device_type)), np.zeros(len(TERMS))
        for job in jobs:
            own_precision, own_information = _evidence(job)
            shrunk = np.linalg.inv(eye + own_precision @ between)
            precision = precision + shrunk @ own_precision
            information = information + shrunk @ own_information
        covariance = np.linalg.inv((precision + precision.T) / 2)
        calibration = Calibration(
            device_type,
            covariance @ information,
            covariance + between,
            sum(job.calibration.num_samples for job in jobs),
            sum(job.calibration.version for job in jobs),
        )
        paces = sorted(job.pace for job in jobs if job.pace is not None)
        return Pool(calibration, paces[len(paces) // 2] if paces else None)

    def differs(self, other: Pool) -> bool:
        moved = np.abs(self.calibration.mean - other.calibration.mean).max() > NOTICEABLE
        return bool(moved) or abs(math.log((self.pace or 1.0) / (other.pace or 1.0))) > NOTICEABLE


def _evidence(job: Known) -> tuple[Array, Array]:
    """Precision, and precision times mean, that a job's own measurements added."""
    before, after = (np.linalg.inv(c.covariance) for c in (job.base, job.calibration))
    return after - before, after @ job.calibration.mean - before @ job.base.mean
