"""The controller's state as a policy sees it: one frozen `Snapshot`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from suika.control.commands import part_left
from suika.control.state import State, Waiting
from suika.core.job import HOLDS_DEVICES, Job, JobSpec, JobState
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.core.snapshot import JobView, MoveCost, ScalingCurve, Snapshot
from suika.estimate.knowledge import Known

SOON_S = 0.05  # a move in flight that is late is still in flight: the least time a view says it will take
RESTING = frozenset({JobState.QUEUED, JobState.UNSATISFIABLE})
IN_FLIGHT = frozenset({JobState.STARTING, JobState.REDEPLOYING, JobState.PREEMPTING})


class Pricing(Protocol):
    """What options and moves cost. Pure, cached."""

    def curve(self, spec: JobSpec, known: tuple[Known, ...] = ()) -> ScalingCurve:
        """The job's options, after what is known by device type; the same objects give the same curve."""
        ...

    def step_s(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> float:
        """Predicted step time, calibrated, not paced."""
        ...

    def others(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> list[dict[str, Any]]:
        """Predictions for other layouts on as many devices."""
        ...

    def device_type(self, plan: Plan) -> str: ...

    def learnt(self, spec: JobSpec, plan: Plan, known: Known, samples: Iterable[StepSample]) -> Known:
        """`known` after the samples of a job that runs under `plan`; the same object if they are no news."""
        ...

    def move_cost(self, specs: Mapping[str, JobSpec]) -> MoveCost:
        """`specs` by job id: a cost depends on the job's model and batch."""
        ...


def take_snapshot(state: State, pricing: Pricing) -> Snapshot:
    """Cluster and jobs now. A job with a decision in flight shows where it is going, and is locked until then."""
    now = state.clock()
    active = state.active()
    going = {waiting.decision.job_id: waiting for waiting in state.waiting}
    _measure(state, pricing, active)
    return Snapshot(
        now_s=now,
        cluster=state.cluster,
        jobs=_views(state, pricing, active, going, now),
        move_cost=pricing.move_cost({job.id: job.spec for job in active}),
        down=frozenset(state.down),
        draining=state.store.draining(),
        quotas=state.quotas,
        slow={device: times for watch in state.watches.values() for device, times in watch.stragglers.slow.items()},
        promised={device: max(until, now + SOON_S) for device, until in state.releasing.items()},
    )


def _measure(state: State, pricing: Pricing, active: Iterable[Job]) -> None:
    """Have the estimator learn from what running jobs show."""
    state.learned.begin_round()
    for job in active:
        watch = state.watch(job.id)
        if job.state is JobState.RUNNING and job.plan is not None and not job.spec.rigid:
            state.learned.settle(job, job.plan, watch.samples, watch.step_s, pricing)


def _views(
    state: State, pricing: Pricing, active: Iterable[Job], going: Mapping[str, Waiting], now: float
) -> tuple[JobView, ...]:
    """A job that waits, and that nothing has happened to, keeps its view: a long queue costs next to nothing."""
    views, resting = [], {}
    for job in active:
        watch, known = state.watch(job.id), state.learned.of(job.id)
        rests = job.state in RESTING and job.id not in going and not watch.held
        rests = rests and max(watch.hold_until_s, watch.busy_until_s) <= now
        basis = (job, state.cluster, *known)
        kept = state.resting.get(job.id) if rests else None
        if kept is None or len(kept[0]) != len(basis) or any(a is not b for a, b in zip(kept[0], basis, strict=True)):
            kept = (basis, _view(state, pricing, job, going.get(job.id), now))
        if rests:
            resting[job.id] = kept
        views.append(kept[1])
    state.resting = resting
    return tuple(views)


def _view(state: State, pricing: Pricing, job: Job, going: Waiting | None, now: float) -> JobView:
    watch, spec = state.watch(job.id), job.spec
    run_s = now - watch.held_since_s if watch.held else 0.0
    gone = job.state is JobState.RUNNING and not watch.held  # only its final checkpoint is still on its way
    plan = None if gone else _present_plan(job, going, watch.void_move)
    until = max(watch.hold_until_s, watch.busy_until_s, going.expected_s if going else 0.0)
    if going or job.state in IN_FLIGHT:
        until = max(until, now + SOON_S)
    return JobView(
        id=job.id,
        state=job.state,
        submitted_s=job.submitted_s,
        remaining_steps=part_left(spec.expected_s, run_s) if spec.rigid else spec.steps - job.steps_done,
        done_steps=job.steps_done,
        curve=pricing.curve(spec, state.learned.of(job.id)),
        min_devices=spec.devices.min,
        max_devices=spec.devices.max,
        requested_devices=spec.devices.requested or spec.devices.max,
        tenant=spec.tenant,
        priority=spec.priority,
        weight=spec.weight,
        started_s=job.started_s,
        layout=plan.layout if plan else None,
        devices=plan.devices if plan else (),
        observed_step_s=watch.step_s if job.state is JobState.RUNNING else None,
        moving_until_s=until if until > now else None,
        attained_device_s=watch.attained_device_s + len(watch.held) * (now - watch.held_since_s),
        last_change_s=watch.last_change_s,
        num_moves=job.num_moves,
        fixed_layout=spec.layout if isinstance(spec.layout, Layout) else None,
        has_state=watch.snapshot is not None,
        stoppable=spec.stoppable,
        pinned=spec.rigid and not spec.stoppable,
    )


def _present_plan(job: Job, going: Waiting | None, void_move: int | None) -> Plan | None:
    """Where the job is, or is going: what nobody else may be given."""
    if going is not None and going.plan is not None:
        return going.plan
    if job.state is JobState.PREEMPTING or job.state not in HOLDS_DEVICES:
        return None
    return job.plan if job.last_generation == void_move else job.target or job.plan
