"""Why a job waits: one stable code and one sentence, the same in every place that shows it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from suika.core.decision import Reason, ReasonCode
from suika.core.layout import AXES, Layout
from suika.core.snapshot import JobView, Option, Snapshot
from suika.plan.mapping import choose_nodes
from suika.plan.ordering import Fabric
from suika.schedule.board import board_of


def feasible_options(fabric: Fabric, job: JobView) -> tuple[Option, ...]:
    """Options that the job's range, its fixed layout and the cluster's nodes allow, whoever holds them now."""
    return tuple(option for option in job.curve.options if allowed(job, option) and fits_empty(fabric, option))


def allowed(job: JobView, option: Option) -> bool:
    if not job.min_devices <= option.num_devices <= job.max_devices:
        return False
    return job.fixed_layout is None or same_cut(option.layout, job.fixed_layout)


def same_cut(layout: Layout, wanted: Layout) -> bool:
    """Whether both cut a model alike, as far as `wanted` says (it may leave the layers per stage open)."""
    if any(getattr(layout, axis) != getattr(wanted, axis) for axis in AXES):
        return False
    return not wanted.layers_per_stage or layout.layers_per_stage == wanted.layers_per_stage


def fits_empty(fabric: Fabric, option: Option) -> bool:
    """Whether the nodes, all empty, could hold the option's shape."""
    sizes = fabric.sizes_of(option.device_type)
    return len(option.shape) <= len(sizes) and all(p <= s for p, s in zip(option.shape, sizes, strict=False))


def why_waits(snapshot: Snapshot, job: JobView, free: np.ndarray, held: Mapping[str, int]) -> Reason:
    """The reason why `job`, which holds nothing, was given nothing; `free` [N] is what others left on each node, `held`
    the devices of each tenant's jobs."""
    reason = _why_waits(snapshot, job, free, held)
    quota, has = snapshot.quotas.get(job.tenant), held.get(job.tenant, 0)
    need = min((option.num_devices for option in job.curve.options if allowed(job, option)), default=0)
    covered = quota is not None and 0 < need <= quota.guarantee - has
    if not covered or reason.code in (ReasonCode.QUOTA, ReasonCode.UNSATISFIABLE):
        return reason
    sentence = f"{reason.sentence}; {quota} for {job.tenant}, which holds {has}: comes when others can give back"
    return Reason(reason.code, sentence)


def _why_waits(snapshot: Snapshot, job: JobView, free: np.ndarray, held: Mapping[str, int]) -> Reason:
    board = board_of(snapshot)
    options = feasible_options(board.fabric, job)
    if not options:
        wanted = str(job.fixed_layout) if job.fixed_layout else f"{job.min_devices}..{job.max_devices} devices"
        sentence = f"no nodes of this cluster ({board.fabric.num_devices} devices) could ever hold {wanted}"
        return Reason(ReasonCode.UNSATISFIABLE, sentence)
    need = min(option.num_devices for option in options)
    quota = snapshot.quotas.get(job.tenant)
    if quota is not None and quota.max is not None:
        has = held.get(job.tenant, 0)
        if has + need > quota.max:
            sentence = f"tenant {job.tenant} holds {has} of at most {quota.max} devices, {need} more needed"
            return Reason(ReasonCode.QUOTA, sentence)
    num_free = int(free.sum())
    if num_free < need:
        higher = sum(len(other.devices) for other in snapshot.jobs if other.priority > job.priority)
        if higher and higher + need > board.num_usable:
            return Reason(ReasonCode.LOWER_PRIORITY, f"jobs of higher priority hold {higher} devices, {need} needed")
        return Reason(ReasonCode.NO_FREE_DEVICES, f"{need} devices needed, {num_free} free")
    zeros = np.zeros_like(free)
    if all(choose_nodes(o.shape, free, zeros) is None for o in options):
        return Reason(ReasonCode.FRAGMENTED, f"{num_free} devices are free, but not {need} where the job needs them")
    return Reason(ReasonCode.QUEUED, f"{num_free} devices are free, of more use to other jobs or kept back for them")
