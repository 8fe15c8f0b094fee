"""What options and moves cost, for the live driver: the estimator's prices after what running jobs have taught."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from suika.control.commands import MovesWithCommands, command_curve
from suika.control.compute import Compute, compute_here
from suika.core.cluster import Cluster
from suika.core.environment import Environment, Preemption
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.core.snapshot import MoveCost, Option, ScalingCurve
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known, Seen
from suika.estimate.predict import Setting, estimate_layout, estimate_many, step_s_of
from suika.plan.curves import curve_of_job, curve_with, paced, setting_of_job
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
    own). A scheduler's curve never counts them: emulated devices stand for real ones, which share nothing. `compute`:
    where what takes long is computed."""

    def __init__(self, cluster: Cluster, cores: int = 0, compute: Compute = compute_here) -> None:
        self.cluster, self.cores, self.compute = cluster, cores, compute
        # Other threads ask while a cluster grows: no answer from the old one's cache may get into a new one's.
        self._unpaced = lru_cache(maxsize=4096)(self._make_unpaced)
        self._curve = lru_cache(maxsize=4096)(self._make_curve)
        self._step_s = lru_cache(maxsize=4096)(self._make_step_s)

    def curve(self, spec: JobSpec, known: tuple[Known, ...] = ()) -> ScalingCurve:
        """`known` by device type; the same objects give the same curve at once."""
        if spec.rigid:
            return command_curve(self.cluster, spec.devices.max, spec.expected_s, spec.devices.type)
        return self._curve(_priced(spec), known)

    def step_s(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> float:
        """Predicted step time in seconds, calibrated; the pace is what a measurement shows beside it. Of a command, how
        long it is expected to run: it is one step."""
        if spec.rigid:
            return spec.expected_s
        device_type = self.device_type(plan)
        return self._step_s(_priced(spec), plan.layout, device_type, shape_of(plan), _calibration(known, device_type))

    def device_type(self, plan: Plan) -> str:
        return self.cluster.node_of[plan.devices[0].node].device_type

    def learnt(self, spec: JobSpec, plan: Plan, known: Known, samples: Iterable[StepSample]) -> Known:
        """`known` after the samples of a job that runs under `plan`; the same object if they are no news."""
        seen = Seen.of(plan.mesh, per_node(plan), spec.global_batch, samples)
        if seen is None or not known.news(seen):
            return known
        places = {s.devices_per_node for s in (*known.seen, seen)}
        settings = {n: self._setting(spec, known.device_type, n) for n in places}
        return self.compute(known.with_seen, seen, settings)

    def others(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> list[dict[str, Any]]:
        """What other layouts would take on as many devices of the same nodes, the fastest first, with 80 % intervals;
        the pace of the job counts for all."""
        if spec.rigid:
            return []
        device_type = self.device_type(plan)
        s = self._setting(spec, device_type, per_node(plan), _calibration(known, device_type))
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
        return curve_with(self.compute(_options, spec, self.cluster, calibrations))

    def _make_step_s(
        self, spec: JobSpec, layout: Layout, device_type: str, shape: tuple[int, ...], calibration: Calibration | None
    ) -> float:
        """The same wherever in the cluster the devices are."""
        return step_s_of(self._setting(spec, device_type, shape[0], calibration), layout)

    def _setting(
        self, spec: JobSpec, device_type: str, devices_per_node: int, calibration: Calibration | None = None
    ) -> Setting:
        cores = self.cores if device_type == "cpu" else 0
        return setting_of_job(spec, self.cluster, device_type, devices_per_node, calibration, cores=cores)


def _options(spec: JobSpec, cluster: Cluster, calibrations: tuple[Calibration, ...]) -> tuple[Option, ...]:
    """Not a curve: its version counts where it is used."""
    return curve_of_job(spec, cluster, {c.device_type: c for c in calibrations}).options


def _calibration(known: Iterable[Known], device_type: str) -> Calibration | None:
    return next((k.calibration for k in known if k.device_type == device_type), None)


def shape_of(plan: Plan) -> tuple[int, ...]:
    """Devices that a plan holds of each of its nodes, descending."""
    held: dict[str, int] = {}
    for device in plan.devices:
        held[device.node] = held.get(device.node, 0) + 1
    return tuple(sorted(held.values(), reverse=True))


def per_node(plan: Plan) -> int:
    """Of the node of which it holds most."""
    return shape_of(plan)[0]
