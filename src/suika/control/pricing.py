"""What options and moves cost, for the live driver: the estimator's curves, corrected by what running jobs show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from suika.core.cluster import Cluster, Device
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.snapshot import MoveCost, ScalingCurve
from suika.estimate.predict import estimate_step
from suika.plan.curves import curve_of_job, slowed
from suika.reshard.assignment import assign
from suika.reshard.state import JobShape
from suika.simulate.moves import PredictedMoves

STEP_OF_CORRECTION = 1.15  # corrections are rounded to powers of this: a curve changes only when it means something


def rounded(slowdown: float) -> float:
    """The nearest power of `STEP_OF_CORRECTION`."""
    return STEP_OF_CORRECTION ** round(math.log(slowdown) / math.log(STEP_OF_CORRECTION))


def _priced(spec: JobSpec) -> JobSpec:
    """`spec` without what has no bearing on its price: jobs of one kind share one curve."""
    same = {"name": "any", "data": "", "steps": 1, "seed": 0, "priority": 0, "weight": 1.0, "tenant": "any"}
    return spec.model_copy(update=same)


class EstimatedPricing:
    """`slowdown` is measured step time / estimated step time of the layout in which a job runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._curve = lru_cache(maxsize=4096)(self._make_curve)
        self._step_s = lru_cache(maxsize=4096)(self._make_step_s)

    def curve(self, spec: JobSpec, slowdown: float = 1.0) -> ScalingCurve:
        return self._curve(_priced(spec), rounded(slowdown))

    def step_s(self, spec: JobSpec, plan: Plan) -> float:
        """The estimator's step time in seconds, nothing corrected."""
        return self._step_s(_priced(spec), plan)

    def move_cost(self, specs: Mapping[str, JobSpec]) -> MoveCost:
        return PredictedMoves({job_id: JobShape.of(spec) for job_id, spec in specs.items()}, self.cluster)

    def place(self, spec: JobSpec, old: Plan, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """`devices` in the rank order that moves the fewest bytes of a job that runs under `old`."""
        return assign(JobShape.of(spec), old, layout, devices, self.cluster)

    def _make_curve(self, spec: JobSpec, slowdown: float) -> ScalingCurve:
        return slowed(curve_of_job(spec, self.cluster), slowdown)

    def _make_step_s(self, spec: JobSpec, plan: Plan) -> float:
        per_node: dict[str, int] = {}
        for device in plan.devices:
            per_node[device.node] = per_node.get(device.node, 0) + 1
        return estimate_step(
            spec.model,
            plan.layout,
            self.cluster.node_of[plan.devices[0].node].device_type,
            global_batch=spec.global_batch,
            sequence_length=spec.sequence_length,
            precision=spec.precision,
            cluster=self.cluster,
            devices_per_node=max(per_node.values()),
        ).step_s
