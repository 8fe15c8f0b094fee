"""`SimJob`: a job as the simulator knows it, with its true curve; and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from suika.core.decision import ReasonCode
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Option, ScalingCurve

Place = tuple[tuple[int, ...], Layout, str]


@dataclass(frozen=True)
class SimJob:
    """`curve` holds true seconds per step; what a policy sees of it is the predictor's business."""

    id: str
    submit_s: float
    num_steps: float
    curve: ScalingCurve
    min_devices: int
    max_devices: int
    requested_devices: int = 0
    model: str = ""
    tenant: str = "default"
    priority: int = 0
    weight: float = 1.0
    deadline_s: float | None = None
    fixed_layout: Layout | None = None
    stoppable: bool = True

    def first_view(self, curve: ScalingCurve) -> JobView:
        """The job as policies see it when it arrives, with the curve that they are told."""
        return JobView(
            self.id,
            JobState.QUEUED,
            self.submit_s,
            remaining_steps=self.num_steps,
            done_steps=0.0,
            curve=curve,
            min_devices=self.min_devices,
            max_devices=self.max_devices,
            tenant=self.tenant,
            priority=self.priority,
            weight=self.weight,
            deadline_s=self.deadline_s,
            requested_devices=self.requested_devices,
            fixed_layout=self.fixed_layout,
            stoppable=self.stoppable,
        )

    @property
    def true_step_s(self) -> Mapping[Place, float]:
        """Seconds per step by (shape, layout, device type); the type is "" where the curve holds for any."""
        return _true_step_s(self.curve)

    @cached_property
    def fastest_step_s(self) -> float:
        return min(o.step_s for o in self._in_range)

    @cached_property
    def least_device_s_per_step(self) -> float:
        return min(o.step_s * o.num_devices for o in self._in_range)

    @cached_property
    def _in_range(self) -> list[Option]:
        return [o for o in self.curve.options if self.min_devices <= o.num_devices <= self.max_devices]

    def step_s_at(self, num_devices: int) -> float:
        """Best seconds per step on at most `num_devices`, else on the smallest size there is."""
        fitting = [o.step_s for o in self._in_range if o.num_devices <= num_devices]
        if fitting:
            return min(fitting)
        smallest = min(o.num_devices for o in self._in_range)
        return min(o.step_s for o in self._in_range if o.num_devices == smallest)


_tables: dict[int, tuple[ScalingCurve, dict[Place, float]]] = {}


def _true_step_s(curve: ScalingCurve) -> Mapping[Place, float]:
    """Remembered per curve object: jobs of one model share it."""
    found = _tables.get(id(curve))
    if found is None or found[0] is not curve:
        found = _tables[id(curve)] = (curve, {(o.shape, o.layout, o.device_type): o.step_s for o in curve.options})
    return found[1]


@dataclass
class Change:
    """One move, stop or resume of a job that had run: decided at `at_s`, it stood still from `begin_s` to `until_s`
    (less than planned if it was broken off; no time for a stop). Devices before and after."""

    at_s: float
    begin_s: float
    until_s: float
    old: int
    new: int
    why: ReasonCode


@dataclass
class Record:
    """What became of one job."""

    job: SimJob
    first_start_s: float | None = None
    end_s: float | None = None
    num_moves: int = 0
    failed_moves: int = 0
    paused_s: float = 0.0  # devices held, no progress: launches, moves
    lost_steps: float = 0.0  # done again after a failure
    device_s: float = 0.0
    paused_device_s: float = 0.0
    spans: list[tuple[float, float, int]] = field(default_factory=list)  # (from, to, devices) for the Gantt
    changes: list[Change] = field(default_factory=list)

    @property
    def jct_s(self) -> float:
        assert self.end_s is not None
        return self.end_s - self.job.submit_s

    @property
    def run_s(self) -> float:
        """From the first start to the end, waits in between included."""
        assert self.end_s is not None
        assert self.first_start_s is not None
        return self.end_s - self.first_start_s
