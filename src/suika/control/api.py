"""What people and programs may ask of a controller. The same calls stand behind the socket and, later, REST.

Everything returned is plain data: numbers, strings, lists and mappings; times in seconds, sizes in bytes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from suika.control.controller import Controller
from suika.control.explained import explained
from suika.control.joblogs import MOST_LINES, JobLogs, Shelf
from suika.control.observe import drop
from suika.control.preview import preview_resize
from suika.control.state import Watch
from suika.control.store import Head, News, Which
from suika.control.submit import admit, check_options, resized
from suika.control.usage import UsageBook
from suika.control.views import take_snapshot
from suika.core.cluster import Device
from suika.core.decision import Reason, ReasonCode
from suika.core.errors import ConflictError, NotFoundError, SpecError, require
from suika.core.job import ENDED, HOLDS_DEVICES, Job, JobState
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.snapshot import Option
from suika.schedule.explain import explain
from suika.schedule.waiting import same_cut

Show = Callable[[Job], str]  # how a job is named to whoever asks


def name_of(job: Job) -> str:
    return job.spec.name


class Api:
    """Safe from any thread: checks run here, changes run on the controller's loop."""

    def __init__(self, controller: Controller, shelf: Shelf | None = None) -> None:
        """`shelf`: where jobs' logs lie."""
        self.controller = controller
        self._logs = JobLogs(controller.state, shelf) if shelf is not None else None
        self.state = controller.state
        self._free = threading.Condition()  # of `_taken`: ids and names of jobs that are being accepted
        self._taken: set[str] = set()
        self._usage = UsageBook(self.state.store)

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        names = ("submit", "jobs", "describe", "resize", "cancel", "drain", "events", "usage", "logs")
        plain = {"explain": lambda job: self.explain(job), "nodes": lambda: self.nodes()}
        return {name: getattr(self, name) for name in names} | plain

    # -- changes ------------------------------------------------------------------------------------------------------

    def submit(self, job: Any, request_id: str | None = None, dry_run: bool = False) -> dict[str, Any]:
        """Accept a job file, parsed. The same `request_id` and body again is the same job; another body is refused."""
        job_id = _job_id(request_id or secrets.token_hex(16))
        known = self._known(job_id, job)
        if known is not None:
            return known
        spec = admit(job, self.state.cluster, self.controller.pricing.curve)
        if dry_run:
            options = [_option(option) for option in self.controller.pricing.curve(spec).options]
            return {"dry_run": True, "spec": spec.model_dump(mode="json"), "options": options}
        with self._accepting(
            job_id, f"{spec.tenant}/{spec.name}"
        ):  # not on the loop: a submission does not wait for a decision
            known = self._known(job_id, job)
            if known is not None:
                return known
            same = [h for h in self.state.store.named(spec.name) if (h.name, h.tenant) == (spec.name, spec.tenant)]
            if any(head.state not in ENDED for head in same):
                raise ConflictError("job.name", spec.name, "a job of this name is still active", "choose another")
            made = Job(job_id, spec, self.state.clock())
            data = {"spec": spec.model_dump(mode="json"), "body": _digest(job)}
            self.state.store.add(made, News(made.submitted_s, "submitted", data))
        self.controller.post(self.state.look_again)
        return self.row(made)

    @contextmanager
    def _accepting(self, *names: str) -> Iterator[None]:
        """Only one submission of an id or a name at a time; others go into the store side by side."""
        with self._free:
            self._free.wait_for(lambda: self._taken.isdisjoint(names))
            self._taken.update(names)
        try:
            yield
        finally:
            with self._free:
                self._taken.difference_update(names)
                self._free.notify_all()

    def _known(self, job_id: str, body: Any) -> dict[str, Any] | None:
        try:
            self.state.store.job(job_id)
        except KeyError:
            return None
        (first,) = self.state.store.events(job_id=job_id, limit=1)
        if first.data["body"] != _digest(body):
            raise ConflictError("request_id", job_id, "was used for another job", "use a new one")
        return self.row(self.state.store.job(job_id))

    def resize(
        self, job: str, devices: str | None = None, layout: str | None = None, dry_run: bool = False
    ) -> dict[str, Any]:
        """A user's wish for another size or layout; the scheduler carries it out, or says why it waits. With `dry_run`
        nothing changes: what the move would cost is returned."""

        def change() -> dict[str, Any]:
            found = self._active(job)
            spec = resized(found.spec, devices, layout, self.state.cluster)
            check_options(spec, self.controller.pricing.curve)
            if dry_run:
                if found.plan is None:
                    raise SpecError("resize", found.spec.name, "does not run yet", "wait until it does")
                options = self.controller.pricing.curve(spec).options
                return preview_resize(spec, found.plan, self._free_devices(), options, self.state.cluster)
            self.state.store.put(found.update(spec=spec))
            fixed = None if spec.layout == "auto" else spec.layout.to_dict()
            wish = {"min": spec.devices.min, "max": spec.devices.max, "layout": fixed}
            self.state.log("resized", found.id, **wish)
            self.state.watch(found.id).hold_until_s = 0.0  # a user's word ends a back-off
            self.state.changed = True
            return self.row(self.state.store.job(found.id))

        return self.controller.call(change)

    def _free_devices(self) -> tuple[Device, ...]:
        state = self.state
        held = {device for watch in state.watches.values() for device in watch.held}
        held |= {*state.releasing, *state.down}
        draining = state.store.draining()
        return tuple(d for d in state.cluster.devices if d not in held and d.node not in draining)

    def cancel(self, job: str) -> dict[str, Any]:
        """End a job for good. Its devices are free once its processes are gone."""

        def change() -> dict[str, Any]:
            found, state = self._active(job), self.state
            watch = state.watch(found.id)
            for waiting in [w for w in state.waiting if w.decision.job_id == found.id]:
                drop(state, waiting, "the job was cancelled")
            reason = Reason(ReasonCode.CANCELLED, "the user cancelled it")
            state.change(found, JobState.CANCELLED, reason, ended_s=state.clock(), target=None)
            if watch.run is not None and watch.held:
                state.give_up(watch.held, state.clock())
                watch.run.kill()
            else:
                state.hold(found.id, ())
                self.controller.retire(watch)
            state.changed = True
            return self.row(state.store.job(found.id))

        return self.controller.call(change)

    def drain(self, node: str, undo: bool = False, deadline_s: float | None = None) -> dict[str, Any]:
        """Move jobs off `node`, within `deadline_s` seconds if that is given, and give it no new work, until `undo`."""
        if node not in self.state.cluster.node_of:
            raise NotFoundError("node", node, "is not in the cluster", "see `suika nodes`")
        number = isinstance(deadline_s, (int, float)) and not isinstance(deadline_s, bool)
        good = deadline_s is None or (number and 0 < deadline_s <= 1e9)
        require(good, "deadline_s", deadline_s, "must be a number of seconds above 0")
        require(not (undo and deadline_s), "deadline_s", deadline_s, "is of no use with undo")

        def change() -> dict[str, Any]:
            drains = self.controller.drains
            if undo:
                drains.end(node)
            else:
                drains.begin(node, deadline_s)
            return next(row for row in self.nodes() if row["name"] == node)

        return self.controller.call(change)

    # -- views --------------------------------------------------------------------------------------------------------

    def jobs(self, all: bool = False) -> list[dict[str, Any]]:
        """Jobs in order of submission; those that have ended too with `all`."""
        store = self.state.store
        return [self.row(job) for job in (store.jobs() if all else store.active())]

    def describe(self, job: str) -> dict[str, Any]:
        """All there is to know of a job: its file, its options, where it runs, its moves."""
        found = self._find(job)
        kinds = frozenset(("redeployed", "move-failed"))
        events = self.state.store.events(job_id=found.id, which=Which(kinds))
        curve = self.controller.pricing.curve(found.spec, self.state.learned.of(found.id))
        watch = self.state.seen(found.id)
        return self.row(found) | {
            "spec": found.spec.model_dump(mode="json"),
            "options": [_option(option) for option in curve.options],
            "redeployments": [dict(event.data) for event in events if event.kind == "redeployed"],
            "step_parts_s": _step_parts_s(watch),
            "stragglers": [
                {"device": str(device), "times": times} for device, times in sorted(watch.stragglers.slow.items())
            ],
            "estimate": self._estimate(found),
            "failed_moves": [dict(event.data) for event in events if event.kind == "move-failed"],
            "memory_copies": None if found.state in ENDED else self.state.seen(found.id).copies,
        }

    def explain(self, job: str, show: Show = name_of) -> dict[str, Any]:
        """Why a job has what it has, or why it waits: the present reason, and every decision about it."""
        found = self._find(job)
        kinds = frozenset(("decided", "waits", "decision-cancelled", "move-failed", "resized", "recovering"))
        events = [event.to_dict() for event in self.state.store.events(job_id=found.id, which=Which(kinds))]
        going = next((w for w in tuple(self.state.waiting) if w.decision.job_id == found.id), None)
        reason, after = (going.decision.reason, tuple(going.after)) if going else (found.reason, ())
        sentence = reason.sentence
        if after:
            others = ", ".join(sorted({show(self.state.store.job(other)) for other in after}))
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
            snapshot = take_snapshot(self.state, self.controller.pricing)
            return explain(snapshot, self.controller.policy, job.id) if job.id in snapshot.job_of else {}

        return self.controller.call(ask)

    def nodes(self, show: Show = name_of) -> list[dict[str, Any]]:
        """Nodes, and for each device who holds it and in which state it is."""
        users: dict[Device, list[str]] = {}
        slow: dict[Device, float] = {}  # times as long as its peers in the same job
        for job in self.state.active():
            watch = self.state.seen(job.id)
            slow |= watch.stragglers.slow
            for device in watch.held:
                users.setdefault(device, []).append(show(job))
        draining, down = self.state.store.draining(), dict(self.state.down)
        copies, most = self.state.rooms.held_bytes(), self.state.rooms.limits()
        releasing = dict(self.state.releasing)

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
                "drain": self.controller.drains.row(node.name),
                "devices": [describe(device) for device in node.devices],
                "copies_bytes": copies.get(node.name, 0),  # of jobs' state, in its memory
                "copies_limit_bytes": most.get(node.name),  # None: it is not here, or does not say
            }
            for node in self.state.cluster.nodes
        ]

    def events(
        self,
        after: int = 0,
        job: str | None = None,
        limit: int = 1000,
        before: int | None = None,
        since: float | None = None,
        newest: bool = False,
    ) -> list[dict[str, Any]]:
        """What happened, oldest first: of the events between numbers `after` and `before` the first `limit`, or the
        last ones with `newest`. `since`: seconds since the epoch; below 0: so long ago by the controller's clock."""
        job_id = self._find(job).id if job else None
        which = Which(before=before, since_s=self.moment(since), last=newest)
        return [event.to_dict() for event in self.state.store.events(after, job_id, max(limit, 0), which)]

    def moment(self, said_s: float | None) -> float | None:
        """Seconds since the epoch, of a time that may be said as so long ago (below 0)."""
        return self.state.clock() + said_s if said_s is not None and said_s < 0 else said_s

    def logs(
        self, job: str, rank: int | None = None, tail: int | None = None, cursor: str | None = None
    ) -> dict[str, Any]:
        """What the job's processes printed: a page after `cursor`, of one `rank` or of all; the last `tail` lines."""
        for field, value, most in (("rank", rank, 1_000_000), ("tail", tail, MOST_LINES)):
            whole = value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most)
            require(whole, field, value, f"must be a whole number, 0..{most}")
        require(cursor is None or isinstance(cursor, str), "cursor", cursor, "must be text")
        require(self._logs is not None, "logs", job, "are not kept here")
        assert self._logs is not None
        return self._logs.page(self._find(job), rank, tail, cursor)

    def usage(
        self, since: float | None = None, until: float | None = None, tenant: str | None = None
    ) -> dict[str, Any]:
        """What was used from `since` to `until` (seconds since the epoch; below 0: so long ago), by tenant and by job
        and device type."""
        return self.usage_seen_by(lambda other: True, since, until, tenant)

    def usage_seen_by(
        self, sees: Callable[[str], bool], since: float | None, until: float | None, tenant: str | None
    ) -> dict[str, Any]:
        """The same, of those tenants that `sees` lets through."""

        def type_of(node: str) -> str | None:
            found = self.state.cluster.node_of.get(node)
            return found.device_type if found is not None else None

        def wanted(other: str) -> bool:
            return tenant in (None, other) and sees(other)

        return self._usage.report(self.state.clock(), type_of, since, until, wanted)

    # -- finding and showing ------------------------------------------------------------------------------------------

    def _find(self, name: str) -> Job:
        """The job of this id or name: the active one, else the latest that ended."""
        found = self.state.store.named(name)
        if not found:
            raise NotFoundError("job", name, "there is no such job", "see `suika ps --all`")
        return self.state.store.job(meant(found, name).id)

    def _active(self, name: str) -> Job:
        job = self._find(name)
        require(job.state not in ENDED, "job", name, f"has ended ({job.state})")
        return job

    def row(self, job: Job) -> dict[str, Any]:
        """A job as `jobs` lists it."""
        watch = self.state.seen(job.id)
        plan = job.target or (job.plan if job.state in HOLDS_DEVICES else None)
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
        return self.controller.pricing.step_s(job.spec, plan, self.state.learned.of(job.id))

    def _estimate(self, job: Job) -> dict[str, Any] | None:
        """The estimator's word on a training job that has a plan: predicted and measured, other layouts, what it
        learned. A command is one step, whose length is its user's word."""
        plan = job.target or (job.plan if job.state in HOLDS_DEVICES else None)
        if plan is None or job.spec.rigid:
            return None
        return explained(job, plan, self.state.seen(job.id).step_s, self.state.learned, self.controller.pricing)


def meant(heads: Sequence[Head], name: str) -> Head:
    """Of the jobs that bear `name` as their id or name: the one of that id, so that nobody hides it by naming his own
    after it; else the active one, else the one that was submitted last. Raises `SpecError` if several are active."""
    if (own := next((head for head in heads if head.id == name), None)) is not None:
        return own
    active = [head for head in heads if head.state not in ENDED]
    ids = ", ".join(head.id for head in active)
    require(len(active) < 2, "job", name, f"is the name of jobs of {len(active)} tenants", f"give an id: {ids}")
    return active[0] if active else max(heads, key=lambda head: head.submitted_s)


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


def _option(option: Option) -> dict[str, Any]:
    return {
        "devices": option.num_devices,
        "shape": list(option.shape),
        "layout": option.layout.to_dict(),
        "step_s": option.step_s,
        "device_type": option.device_type,
    }


def _job_id(request_id: str) -> str:
    """A function of the request alone: a retry names the same job."""
    return "j" + hashlib.sha256(request_id.encode()).hexdigest()[:10]


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
