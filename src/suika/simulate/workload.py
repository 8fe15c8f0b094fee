"""From a trace to jobs that can be simulated: the one documented, seeded rule that fills in what traces leave out.

Frozen before any policy was tuned:
- model: the trace's, else uniform among the models whose smallest option is not above the request;
- steps: the trace's, else such that the model's best time at the requested count takes the trace's duration;
- range: the trace's, else from max(1, requested / 4) to min(4 x requested, capacity), rounded inwards to feasible
  counts; a share of jobs can be made rigid (both ends at the request);
- arrivals: as they are for seed 0; other seeds shift each by up to half the mean gap, either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from suika.core.cluster import Cluster
from suika.core.errors import SpecError, require
from suika.core.quota import Quota
from suika.core.snapshot import ScalingCurve
from suika.plan.ordering import fabric
from suika.schedule.waiting import fits_empty
from suika.simulate.jobs import SimJob
from suika.simulate.times import Models
from suika.simulate.trace import DirtyRow, Trace, TraceJob


@dataclass(frozen=True)
class Workload:
    jobs: tuple[SimJob, ...]
    left_out: tuple[DirtyRow, ...]  # by place in the trace, from 1
    load: float | None  # None: all jobs come at once
    rule: str


def build(
    trace: Trace,
    cluster: Cluster,
    models: Models,
    *,
    seed: int = 0,
    load: float | None = None,
    elastic_share: float = 1.0,
    quotas: Mapping[str, Quota] | None = None,
) -> Workload:
    """Jobs of `trace` on `cluster`. `load` rescales arrivals so that sum(devices x duration) / (capacity x last
    submission) = `load`. Jobs that a tenant's maximum in `quotas` never lets run are left out."""
    require(0 <= elastic_share <= 1, "elastic-share", elastic_share, "must be between 0 and 1")
    require(load is None or 0 < load < 1e6, "load", load, "must be above 0 and below 1e6")
    at_once = trace.jobs[-1].submit_s == 0.0
    require(load is None or not at_once, "load", load, "the jobs of this trace all come at once", "leave it out")
    capacity = cluster.num_devices
    counts = {name: _counts(curve, cluster) for name, curve in models.curves.items()}
    rng = np.random.default_rng([seed, 20260])
    jobs, left_out = [], []
    for place, traced in enumerate(trace.jobs, start=1):
        # Two draws per job whatever comes of them: one job's fate does not change the others' models.
        pick, rigid = rng.random(2)
        if traced.devices > capacity:
            left_out.append(DirtyRow(place, f"job {traced.id} asks for {traced.devices} of {capacity} devices"))
            continue
        job = _job(traced, models, counts, float(pick), rigid >= elastic_share, capacity)
        most = (quotas or {}).get(traced.tenant, Quota()).max
        if job is not None and most is not None and job.min_devices > most:
            reason = f"job {traced.id} needs {job.min_devices} devices, its tenant {traced.tenant} may hold {most}"
            left_out.append(DirtyRow(place, reason))
        elif job is None:
            left_out.append(
                DirtyRow(place, f"job {traced.id}: no model runs on {traced.devices} devices or fewer here")
            )
        else:
            jobs.append(job)
    if not jobs:
        raise SpecError("jobs", trace.name, "no job of this trace fits the cluster")
    jobs = _arrivals(jobs, trace, capacity, seed, load)
    rule = "as traced" if all(job.model for job in trace.jobs) else f"models assigned by the seeded rule (seed {seed})"
    found = load if load is not None else None if at_once else load_of(trace.jobs, capacity)
    return Workload(tuple(jobs), tuple(left_out), found, rule)


def load_of(jobs: Sequence[TraceJob], capacity: int) -> float:
    """Requested device-seconds over what the cluster offers until the last submission, which is after 0."""
    last_s = max(job.submit_s for job in jobs)
    asked = sum(job.devices * job.duration_s for job in jobs if job.devices <= capacity)
    return asked / (capacity * last_s)


def _counts(curve: ScalingCurve, cluster: Cluster) -> tuple[int, ...]:
    """Device counts at which the model runs on this cluster, ascending."""
    here = fabric(cluster)
    return tuple(sorted({o.num_devices for o in curve.options if fits_empty(here, o)}))


def _job(
    traced: TraceJob, models: Models, counts: dict[str, tuple[int, ...]], pick: float, rigid: bool, capacity: int
) -> SimJob | None:
    if traced.model:
        model = traced.model
        models.curve(model)
    else:
        drawn = counts.keys() - models.by_name_only
        fitting = sorted(name for name in drawn if counts[name] and counts[name][0] <= traced.devices)
        if not fitting:
            return None
        model = fitting[int(pick * len(fitting))]
    known = counts[model]
    if not known:
        return None
    asked = max((num for num in known if num <= traced.devices), default=known[0])
    low = traced.min_devices or max(1, traced.devices // 4)
    high = traced.max_devices or min(4 * traced.devices, capacity)
    smallest = min((num for num in known if low <= num <= asked), default=asked)
    largest = max((num for num in known if asked <= num <= high), default=asked)
    if rigid:
        smallest = largest = asked
    job = SimJob(
        traced.id,
        traced.submit_s,
        traced.num_steps or 1.0,
        models.curve(model),
        smallest,
        largest,
        requested_devices=asked,
        model=model,
        tenant=traced.tenant,
        priority=traced.priority,
        weight=traced.weight,
        deadline_s=traced.deadline_s,
    )
    if not traced.num_steps:
        job = replace(job, num_steps=traced.duration_s / job.step_s_at(asked))
    return job


def _arrivals(jobs: list[SimJob], trace: Trace, capacity: int, seed: int, load: float | None) -> list[SimJob]:
    last_s = max(job.submit_s for job in trace.jobs)
    factor = 1.0 if load is None else load_of(trace.jobs, capacity) / load
    shift_s = np.zeros(len(jobs))
    if seed:
        gap_s = last_s / max(len(jobs) - 1, 1)
        shift_s = np.random.default_rng([seed, 20261]).uniform(-gap_s / 2, gap_s / 2, len(jobs))
    moved = [
        replace(job, submit_s=max(job.submit_s + float(shift), 0.0) * factor)
        for job, shift in zip(jobs, shift_s, strict=True)
    ]
    return sorted(moved, key=lambda job: (job.submit_s, job.id))
