"""What options and moves cost, for the live driver: the estimator's curves, corrected by what running jobs show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from suika.core.cluster import Cluster, Device
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.core.snapshot import JobView, Move, MoveCost, ScalingCurve
from suika.core.tensors import num_parameters
from suika.estimate.predict import Calibrated, estimate_step
from suika.estimate.step import OP_CLASSES
from suika.plan.curves import curve_of_job
from suika.reshard.links import Links
from suika.reshard.predict import predict
from suika.reshard.state import ITEM_BYTES, JobShape, optimizer_kinds, weight_dtype

STEP_OF_CORRECTION = 1.15  # corrections are rounded to powers of this: a curve changes only when it means something
FIXED_PAUSE_S = 0.2  # of any move: cut, checks, switch; measured on CPU (docs/numbers/demo.md)
MEASURED_SIGMA = 0.05  # of log(time) left after one layout was measured


def rounded(slowdown: float) -> float:
    """The nearest power of `STEP_OF_CORRECTION`."""
    return STEP_OF_CORRECTION ** round(math.log(slowdown) / math.log(STEP_OF_CORRECTION))


class EstimatedPricing:
    """`slowdown` is measured step time / estimated step time of the layout in which a job runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._curve = lru_cache(maxsize=4096)(self._make_curve)
        self._step_s = lru_cache(maxsize=4096)(self._make_step_s)

    def curve(self, spec: JobSpec, slowdown: float = 1.0) -> ScalingCurve:
        return self._curve(spec, rounded(slowdown))

    def step_s(self, spec: JobSpec, plan: Plan) -> float:
        """The estimator's step time in seconds, nothing corrected."""
        return self._step_s(spec, plan)

    def move_cost(self, specs: Mapping[str, JobSpec], launch_s: float) -> MoveCost:
        return PredictedMoves(self.cluster, specs, launch_s)

    def _make_curve(self, spec: JobSpec, slowdown: float) -> ScalingCurve:
        types = {node.device_type for node in self.cluster.nodes}
        correction = Calibrated(dict.fromkeys(OP_CLASSES, math.log(slowdown)), MEASURED_SIGMA)
        calibrations = None if slowdown == 1.0 else dict.fromkeys(types, correction)
        return curve_of_job(spec, self.cluster, calibrations)

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


class PredictedMoves:
    """`MoveCost` from the resharder's plan of each move. Memory and time of a plan are shared by equal questions."""

    def __init__(self, cluster: Cluster, specs: Mapping[str, JobSpec], launch_s: float) -> None:
        self.cluster = cluster
        self.specs = specs
        self.launch_s = launch_s

    def __call__(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> Move:
        if job.layout is None:
            return Move(self.launch_s, 0.0)
        shape = JobShape.of(self.specs[job.id])
        old = Plan(job.layout.resolve(shape.model), Placement(job.devices))
        return _predicted(shape, old, Plan(layout.resolve(shape.model), Placement(devices)), self.cluster)

    def typical(self, job: JobView) -> float:
        """A start, or the whole state over the links between nodes, shared by the job's devices."""
        if job.layout is None:
            return self.launch_s
        shape = JobShape.of(self.specs[job.id])
        link = Links(self.cluster, job.devices).bytes_per_s["rack"]
        return state_bytes(shape) / len(job.devices) / link + FIXED_PAUSE_S


def state_bytes(shape: JobShape) -> int:
    """Weights and optimizer state of one replica."""
    kinds = [weight_dtype(shape.precision), *optimizer_kinds(shape.precision).values()]
    return num_parameters(shape.model, shape.sequence_length) * sum(ITEM_BYTES[kind] for kind in kinds)


@lru_cache(maxsize=4096)
def _predicted(shape: JobShape, old: Plan, new: Plan, cluster: Cluster) -> Move:
    return predict(shape, old, new, cluster)
