"""What people and programs may ask of a controller. The same calls stand behind the socket and REST.

Everything returned is plain data: numbers, strings, lists and mappings; times in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from suika.control.controller import Controller
from suika.control.joblogs import MOST_LINES, JobLogs, Shelf
from suika.control.observe import drop
from suika.control.preview import preview_resize
from suika.control.reports import Reports, Show, name_of
from suika.control.store import Head, Which
from suika.control.submissions import Submissions
from suika.control.submit import check_options, resized
from suika.control.usage import UsageBook
from suika.core.cluster import Device
from suika.core.decision import Reason, ReasonCode
from suika.core.errors import NotFoundError, SpecError, require
from suika.core.job import ENDED, Job, JobState


class Api:
    """Safe from any thread: checks run here, changes run on the controller's loop."""

    def __init__(self, controller: Controller, shelf: Shelf | None = None) -> None:
        """`shelf`: where jobs' logs lie."""
        self.controller = controller
        self._logs = JobLogs(controller.state, shelf) if shelf is not None else None
        self.state = controller.state
        self.reports = Reports(controller)
        self._submissions = Submissions(controller, self.reports)
        self._usage = UsageBook(self.state.store)

    def calls(self) -> Mapping[str, Callable[..., Any]]:
        names = ("submit", "jobs", "describe", "resize", "cancel", "drain", "events", "usage", "logs")
        plain = {"explain": lambda job: self.explain(job), "nodes": lambda: self.nodes()}
        return {name: getattr(self, name) for name in names} | plain

    # -- changes ------------------------------------------------------------------------------------------------------

    def submit(self, job: Any, request_id: str | None = None, dry_run: bool = False) -> dict[str, Any]:
        """Accept a job file, parsed. The same `request_id` and body again is the same job; another body is refused."""
        return self._submissions.submit(job, request_id, dry_run)

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
            return self.reports.row(self.state.store.job(found.id))

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
            return self.reports.row(state.store.job(found.id))

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
        return [self.reports.row(job) for job in (store.jobs() if all else store.active())]

    def describe(self, job: str) -> dict[str, Any]:
        """All there is to know of a job: its file, its options, where it runs, its moves."""
        return self.reports.description(self._find(job))

    def explain(self, job: str, show: Show = name_of) -> dict[str, Any]:
        """Why a job has what it has, or why it waits: the present reason, and every decision about it."""
        return self.reports.explanation(self._find(job), show)

    def nodes(self, show: Show = name_of) -> list[dict[str, Any]]:
        """Nodes, and for each device who holds it and in which state it is."""
        return self.reports.nodes(show)

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

    # -- finding ------------------------------------------------------------------------------------------------------

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


def meant(heads: Sequence[Head], name: str) -> Head:
    """Of the jobs that bear `name` as their id or name: the one of that id, so that nobody hides it by naming his own
    after it; else the active one, else the one that was submitted last. Raises `SpecError` if several are active."""
    if (own := next((head for head in heads if head.id == name), None)) is not None:
        return own
    active = [head for head in heads if head.state not in ENDED]
    ids = ", ".join(head.id for head in active)
    require(len(active) < 2, "job", name, f"is the name of jobs of {len(active)} tenants", f"give an id: {ids}")
    return active[0] if active else max(heads, key=lambda head: head.submitted_s)
