"""What options and moves cost, for the live driver: the estimator's prices after what running jobs have taught."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from suika.control.commands import MovesWithCommands, command_curve
from suika.core.cluster import Cluster
from suika.core.environment import Environment, Preemption
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.core.snapshot import MoveCost, ScalingCurve
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known, Seen
from suika.estimate.predict import Setting, estimate_layout, estimate_many
from suika.plan.curves import curve_of_job, paced, setting_of_job
from suika.plan.layouts import BUILT_IN, layout_columns
from suika.reshard.predict import MovePredictor
from suika.reshard.state import JobShape

OTHERS_SHOWN = 12  # layouts of the present device count, fastest first


@lru_cache(maxsize=16384)
def _priced(spec: JobSpec) -> JobSpec:
    """`spec` without what has no bearing on its price: jobs of one kind share one curve."""
    same = {"name": "any", "data": "", "steps": 1, "seed": 0, "priority": 0, "weight": 1.0, "tenant": "any"}
    same |= {"final_checkpoint": None, "environment": Environment(), "preemption": Preemption()}
    return spec.model_copy(update=same)


@lru_cache(maxsize=4096)
def _shared(shape: JobShape) -> JobShape:
    """One object for all jobs of a kind: a snapshot that is sent elsewhere holds it once."""
    return shape


class EstimatedPricing:
    """`cores`: processor cores that all emulated devices share, for what is predicted to be measured (0: each has its
    own). A scheduler's curve never counts them: emulated devices stand for real ones, which share nothing."""

    def __init__(self, cluster: Cluster, cores: int = 0) -> None:
        self.cluster, self.cores = cluster, cores
        self._curve = lru_cache(maxsize=4096)(self._make_curve)
        self._unpaced = lru_cache(maxsize=4096)(self._make_unpaced)
        self._step_s = lru_cache(maxsize=4096)(self._make_step_s)
        self._layout_step_s = lru_cache(maxsize=4096)(self._make_layout_step_s)

    def curve(self, spec: JobSpec, known: tuple[Known, ...] = ()) -> ScalingCurve:
        """`known` by device type; the same objects give the same curve at once."""
        if spec.rigid:
            return command_curve(self.cluster, spec.devices.max, spec.expected_s, spec.devices.type)
        return self._curve(_priced(spec), known)

    def step_s(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> float:
        """Predicted step time in seconds, calibrated; the pace is what a measurement shows beside it. Of a command, how
        long it is expected to run: it is one step."""
        return spec.expected_s if spec.rigid else self._step_s(_priced(spec), plan, known)

    def device_type(self, plan: Plan) -> str:
        return self.cluster.node_of[plan.devices[0].node].device_type

    def learnt(self, spec: JobSpec, plan: Plan, known: Known, samples: Iterable[StepSample]) -> Known:
        """`known` after the samples of a job that runs under `plan`; the same object if they are no news."""
        seen = Seen.of(plan.mesh, per_node(plan), spec.global_batch, samples)
        if seen is None or not known.news(seen):
            return known
        places = {s.devices_per_node for s in (*known.seen, seen)}
        return known.with_seen(seen, {n: self._setting(spec, known.device_type, n) for n in places})

    def others(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> list[dict[str, Any]]:
        """What other layouts would take on as many devices of the same nodes, the fastest first, with 80 % intervals;
        the pace of the job counts for all."""
        if spec.rigid:
            return []
        device_type = self.device_type(plan)
        s = self._setting(spec, device_type, per_node(plan), known)
        pace = next((k.pace for k in known if k.device_type == device_type), None) or 1.0
        columns = layout_columns(
            spec.model,
            [len(plan.devices)],
            global_batch=spec.global_batch,
            sequence_length=spec.sequence_length,
            space=BUILT_IN,
            devices_per_node=per_node(plan),
        )
        prices, memories = estimate_many(s, columns)
        step = np.where(memories.p90 <= s.device.memory_bytes, prices.step_s, np.inf)
        order = [int(i) for i in np.argsort(step, kind="stable") if np.isfinite(step[i])][: OTHERS_SHOWN + 1]
        layouts = [layout for i in order if (layout := columns.layout(i, spec.model)) != plan.layout]
        priced = [(layout, estimate_layout(s, layout)) for layout in layouts[:OTHERS_SHOWN]]
        rows = [
            {
                "layout": layout.to_dict(),
                "predicted_step_s": e.step_s * pace,
                "p10_s": e.step_p10_s * pace,
                "p90_s": e.step_p90_s * pace,
            }
            for layout, e in priced
        ]
        return sorted(rows, key=lambda row: float(row["predicted_step_s"]))  # type: ignore[arg-type]

    def move_cost(self, specs: Mapping[str, JobSpec]) -> MoveCost:
        shapes = {job_id: _shared(JobShape.of(spec)) for job_id, spec in specs.items() if not spec.rigid}
        graces = {job_id: spec.preemption.grace_s for job_id, spec in specs.items() if spec.rigid}
        moves = MovePredictor.of(shapes, self.cluster)
        return MovesWithCommands(moves, graces) if graces else moves

    def _make_curve(self, spec: JobSpec, known: tuple[Known, ...]) -> ScalingCurve:
        return paced(self._unpaced(spec, tuple(k.calibration for k in known)), known)

    def _make_unpaced(self, spec: JobSpec, calibrations: tuple[Calibration, ...]) -> ScalingCurve:
        """The costly part, which a change of pace leaves as it is."""
        return curve_of_job(spec, self.cluster, {c.device_type: c for c in calibrations})

    def _make_step_s(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...]) -> float:
        return self._layout_step_s(spec, plan.layout, self.device_type(plan), per_node(plan), known)

    def _make_layout_step_s(
        self, spec: JobSpec, layout: Layout, device_type: str, devices_per_node: int, known: tuple[Known, ...]
    ) -> float:
        """The same wherever in the cluster the devices are."""
        return estimate_layout(self._setting(spec, device_type, devices_per_node, known), layout).step_s

    def _setting(
        self, spec: JobSpec, device_type: str, devices_per_node: int, known: tuple[Known, ...] = ()
    ) -> Setting:
        calibration = next((k.calibration for k in known if k.device_type == device_type), None)
        cores = self.cores if device_type == "cpu" else 0
        return setting_of_job(spec, self.cluster, device_type, devices_per_node, calibration, cores=cores)


def per_node(plan: Plan) -> int:
    """Devices that a plan holds of the node of which it holds most."""
    held: dict[str, int] = {}
    for device in plan.devices:
        held[device.node] = held.get(device.node, 0) + 1
    return max(held.values())
