"""What a controller shows of its jobs and nodes: rows, descriptions and explanations, as plain data.

Times are in seconds, sizes in bytes. Safe from any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suika.control.controller import Controller
from suika.control.explained import explained
from suika.control.state import Watch
from suika.control.store import Which
from suika.control.views import take_snapshot
from suika.core.cluster import Device
from suika.core.job import ENDED, HOLDS_DEVICES, Job, JobState
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.snapshot import Option
from suika.schedule.explain import explain
from suika.schedule.waiting import same_cut

Show = Callable[[Job], str]  # how a job is named to whoever asks


def name_of(job: Job) -> str:
    return job.spec.name


class Reports:
    """Of one controller."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._state = controller.state

    def row(self, job: Job) -> dict[str, Any]:
        """A job as `jobs` lists it."""
        watch, plan = self._state.seen(job.id), _plan_of(job)
        return {
            "id": job.id,
            "name": job.spec.name,
            "kind": "command" if job.spec.rigid else "training",
            "state": job.state,
            "reason": {"code": job.reason.code, "sentence": job.reason.sentence},
            "tenant": job.spec.tenant,
            "priority": job.spec.priority,
            "layout": plan.layout.to_dict() if plan else None,
            "devices": [str(device) for device in plan.devices] if plan else [],
            "generation": job.generation,
            "steps_done": job.steps_done,
            "steps": job.spec.steps,
            "loss": watch.loss,
            "step_s": watch.step_s,
            "predicted_step_s": self._predicted_step_s(job, plan),
            "num_moves": job.num_moves,
            "submitted_s": job.submitted_s,
            "started_s": job.started_s,
            "ended_s": job.ended_s,
            "exit_code": job.exit_code,
            "jct_s": job.ended_s - job.submitted_s if job.ended_s is not None else None,
        }

    def _predicted_step_s(self, job: Job, plan: Plan | None) -> float | None:
        if plan is None:
            return None
        return self._controller.pricing.step_s(job.spec, plan, self._state.learned.of(job.id))

    def description(self, found: Job) -> dict[str, Any]:
        """All there is to know of a job: its file, its options, where it runs, its moves."""
        kinds = frozenset(("redeployed", "move-failed"))
        events = self._state.store.events(job_id=found.id, which=Which(kinds))
        curve = self._controller.pricing.curve(found.spec, self._state.learned.of(found.id))
        watch = self._state.seen(found.id)
        return self.row(found) | {
            "spec": found.spec.model_dump(mode="json"),
            "options": [option_row(option) for option in curve.options],
            "redeployments": [dict(event.data) for event in events if event.kind == "redeployed"],
            "step_parts_s": _step_parts_s(watch),
            "stragglers": [
                {"device": str(device), "times": times} for device, times in sorted(watch.stragglers.slow.items())
            ],
            "estimate": self._estimate(found, watch.step_s),
            "failed_moves": [dict(event.data) for event in events if event.kind == "move-failed"],
            "memory_copies": None if found.state in ENDED else watch.copies,
        }

    def _estimate(self, job: Job, measured_step_s: float | None) -> dict[str, Any] | None:
        """The estimator's word on a training job that has a plan: predicted and measured, other layouts, what it
        learned. A command is one step, whose length is its user's word."""
        plan = _plan_of(job)
        if plan is None or job.spec.rigid:
            return None
        return explained(job, plan, measured_step_s, self._state.learned, self._controller.pricing)

    def explanation(self, found: Job, show: Show = name_of) -> dict[str, Any]:
        """Why a job has what it has, or why it waits: the present reason, and every decision about it."""
        kinds = frozenset(("decided", "waits", "decision-cancelled", "move-failed", "resized", "recovering"))
        events = [event.to_dict() for event in self._state.store.events(job_id=found.id, which=Which(kinds))]
        going = next((w for w in tuple(self._state.waiting) if w.decision.job_id == found.id), None)
        reason, after = (going.decision.reason, tuple(going.after)) if going else (found.reason, ())
        sentence = reason.sentence
        if after:
            others = ", ".join(sorted({show(self._state.store.job(other)) for other in after}))
            sentence += f" (waits until {others} has given up its devices)"
        elif going is None and (wish := _unmet_wish(found)):
            sentence += f"; its user wants {wish}, which waits for free devices"
        return {
            "id": found.id,
            "name": found.spec.name,
            "state": found.state,
            "reason": {"code": reason.code, "sentence": sentence},
            "history": events,
            **self._alternatives(found),
        }

    def _alternatives(self, job: Job) -> dict[str, Any]:
        """What the job could run as, and what would change what it has, tried out on a snapshot of now."""
        if job.state in ENDED:
            return {}

        def ask() -> dict[str, Any]:
            snapshot = take_snapshot(self._state, self._controller.pricing)
            return explain(snapshot, self._controller.policy, job.id) if job.id in snapshot.job_of else {}

        return self._controller.call(ask)

    def nodes(self, show: Show = name_of) -> list[dict[str, Any]]:
        """Nodes, and for each device who holds it and in which state it is."""
        users: dict[Device, list[str]] = {}
        slow: dict[Device, float] = {}  # times as long as its peers in the same job
        for job in self._state.active():
            watch = self._state.seen(job.id)
            slow |= watch.stragglers.slow
            for device in watch.held:
                users.setdefault(device, []).append(show(job))
        draining, down = self._state.store.draining(), dict(self._state.down)
        copies, most = self._state.rooms.held_bytes(), self._state.rooms.limits()
        releasing = dict(self._state.releasing)

        def describe(device: Device) -> dict[str, Any]:
            state = "down" if device in down else "releasing" if device in releasing else "free"
            jobs = users.get(device, [])
            shown = "used" if jobs and state == "free" else state
            return {"device": str(device), "state": shown, "jobs": jobs, "slow": slow.get(device)}

        return [
            {
                "name": node.name,
                "type": node.device_type,
                "draining": node.name in draining,
                "drain": self._controller.drains.row(node.name),
                "devices": [describe(device) for device in node.devices],
                "copies_bytes": copies.get(node.name, 0),  # of jobs' state, in its memory
                "copies_limit_bytes": most.get(node.name),  # None: it is not here, or does not say
            }
            for node in self._state.cluster.nodes
        ]


def _plan_of(job: Job) -> Plan | None:
    """Where the job is, or is going."""
    return job.target or (job.plan if job.state in HOLDS_DEVICES else None)


def _unmet_wish(job: Job) -> str | None:
    """What its user wants of a running job and it is not yet."""
    if job.state is not JobState.RUNNING or job.plan is None:
        return None
    wish, num_devices = job.spec.layout, job.plan.layout.num_ranks
    if isinstance(wish, Layout) and not same_cut(job.plan.layout, wish):
        return str(wish)
    wanted = job.spec.devices
    return None if wanted.min <= num_devices <= wanted.max else f"{wanted.min}..{wanted.max} devices"


def _step_parts_s(watch: Watch) -> dict[str, float]:
    """Where a step's time goes, as the latest sampled step of each rank shows it: the mean over ranks."""
    samples = watch.samples.newest
    parts = sorted({part for sample in samples for part in sample.op_s})
    found = {part: sum(sample.op_s.get(part, 0.0) for sample in samples) / len(samples) for part in parts}
    return found | ({"idle": sum(sample.idle_s for sample in samples) / len(samples)} if samples else {})


def option_row(option: Option) -> dict[str, Any]:
    return {
        "devices": option.num_devices,
        "shape": list(option.shape),
        "layout": option.layout.to_dict(),
        "step_s": option.step_s,
        "device_type": option.device_type,
    }
