"""The passive half of the loop: what the jobs' processes report becomes records and events. Nothing is started here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, singledispatchmethod
from typing import Any

from suika.control.final import Deliver
from suika.control.state import State, Waiting, Watch
from suika.core.decision import Reason, ReasonCode
from suika.core.job import ENDED, Job, JobState
from suika.core.redeployment import Phase, Redeployment
from suika.runtime.events import (
    Copied,
    Ended,
    JobEvent,
    Measured,
    Moving,
    Outcome,
    Released,
    Sampled,
    Snapshotted,
    Started,
    StepDone,
    Uncopied,
)
from suika.schedule.back_off import back_off_s

MAX_RECOVERIES = 5  # without a new snapshot in between: then the job is given up
DELIVERY_S = 1e6  # a job whose final checkpoint is being copied is left alone, however long it takes

_OF_COPIES = ("generation", "step", "num_bytes", "nodes", "lacking")


class Observer:
    """`see` takes one report. A report of a generation that is not the job's any more changes nothing."""

    def __init__(self, state: State, device_hold_s: float, retire: Callable[[Watch], None], deliver: Deliver) -> None:
        self.state = state
        self.deliver = deliver
        self.device_hold_s = device_hold_s
        self.retire = retire
        self._afterwards: list[Callable[[], None]] = []  # what is done once a report's changes are written

    def see(self, report: JobEvent) -> None:
        """What one report changes is written at once, or not at all. Steps are many, and change no record."""
        with nullcontext() if isinstance(report, StepDone | Sampled | Copied) else self._whole():
            self._see(report)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """One transaction. If it fails, decisions wait as before, since whoever is told again must find them so; what
        cannot be taken back is begun only when it is written."""
        state = self.state
        waiting = [(each, set(each.after)) for each in state.waiting]
        self._afterwards = []
        try:
            with state.store.together():
                yield
        except BaseException:
            for each, after in waiting:
                each.after = after
            state.waiting[:] = [each for each, _ in waiting]
            raise
        for action in self._afterwards:
            action()

    @singledispatchmethod
    def _see(self, report: JobEvent) -> None:
        """A report that changes no record."""

    @_see.register
    def _(self, report: Started) -> None:
        state = self.state
        job, watch = state.store.job(report.job_id), state.watch(report.job_id)
        if job.state is not JobState.STARTING or job.generation != report.generation:
            return
        watch.busy_until_s, watch.launch_s = 0.0, report.launch_s
        started_s = job.started_s if job.started_s is not None else state.clock()
        state.change(job, JobState.RUNNING, job.reason, started_s=started_s)
        assert job.plan is not None
        told = {name: getattr(report, name) for name in ("launch_s", "resumed_step", "copies")}
        state.log("launched", job.id, generation=job.generation, plan=job.plan.to_dict(), **told)
        state.changed = True

    @_see.register
    def _(self, report: StepDone) -> None:
        watch = self.state.watch(report.job_id)
        if not self.state.store.progress(report.job_id, report.generation, report.step):
            return
        watch.loss = report.loss
        known = watch.step_s is not None
        watch.steps_seen.append((report.step, report.at_s))
        if not known and watch.step_s is not None:
            self.state.changed = True  # this layout's first measurement

    @_see.register
    def _(self, report: Sampled) -> None:
        """A sample of another generation was on its way when the job moved."""
        state, watch = self.state, self.state.watch(report.job_id)
        watch.samples.add(report.sample)
        job = state.store.job(report.job_id)
        if job.plan is None or report.generation != job.generation:
            return
        for device, times in watch.stragglers.look(job.plan, watch.samples.by_rank, watch.samples.num_samples):
            if times:
                sentence = f"{device} takes {times:.1f} times as long as its peers"
                state.log("straggler", job.id, device=str(device), times=times, sentence=sentence)
            else:
                state.log("straggler-gone", job.id, device=str(device))

    @_see.register
    def _(self, report: Moving) -> None:
        record = report.record
        if record.phase is Phase.COMMIT:
            self._moved(record)
        elif record.phase is Phase.ABORTED:
            self._move_failed(report.job_id, record.error or "aborted", record)

    def _moved(self, record: Redeployment) -> None:
        state = self.state
        job, watch = state.store.job(record.job_id), state.watch(record.job_id)
        if job.state is not JobState.REDEPLOYING:
            return  # cancelled meanwhile: its end is on the way
        watch.steps_seen.clear()
        watch.samples.clear()
        watch.stragglers.clear()
        watch.busy_until_s, watch.failed_moves = 0.0, 0
        state.hold(job.id, record.new.devices)
        state.change(job, JobState.RUNNING, record.reason, target=None)
        state.log(
            "committed", job.id, generation=record.generation, cut_step=record.cut_step, plan=record.new.to_dict()
        )
        state.changed = True

    def move_failed(self, job_id: str, error: str) -> None:
        """A move could not even be begun."""
        with self._whole():
            self._move_failed(job_id, error)

    def _move_failed(self, job_id: str, error: str, record: Redeployment | None = None) -> None:
        """The old generation trains on; the job is left alone for a while, longer each time."""
        state = self.state
        job, watch = state.store.job(job_id), state.watch(job_id)
        if job.state is not JobState.REDEPLOYING:
            return
        num_failed = watch.failed_moves + 1
        self._afterwards.append(partial(setattr, watch, "failed_moves", num_failed))
        watch.busy_until_s = 0.0
        watch.hold_until_s = state.clock() + back_off_s(num_failed)
        assert job.plan is not None
        state.freed((*job.plan.devices, *(job.target.devices if job.target else ())))  # not given up after all
        state.hold(job.id, job.plan.devices)
        state.change(job, JobState.RUNNING, job.reason, target=None)
        state.log("move-failed", job_id, error=error, record=record_dict(record) if record else None)
        cancel_dependants(state, job_id, f"the move of {job.id} failed: {error}")
        state.changed = True

    @_see.register
    def _(self, report: Released) -> None:
        self.state.freed(report.devices)
        # A move that is called off lets its joiners go while it still moves: who waits for the old devices waits on.
        if self.state.store.job(report.job_id).state is not JobState.REDEPLOYING:
            for waiting in self.state.waiting:
                waiting.after.discard(report.job_id)
        self.state.log("released", report.job_id, devices=[str(device) for device in report.devices])

    @_see.register
    def _(self, report: Measured) -> None:
        self.state.log("redeployed", report.job_id, **record_dict(report.record))

    @_see.register
    def _(self, report: Snapshotted) -> None:
        state = self.state
        if not state.store.saved(report.job_id, report.generation, report.step, report.path):
            return
        job = state.store.job(report.job_id)
        state.watch(job.id).snapshot = report.path
        if job.num_recoveries:
            state.store.put(job.update(num_recoveries=0))
        state.log("snapshot", job.id, step=report.step, stall_s=report.stall_s)

    @_see.register
    def _(self, report: Copied) -> None:
        """As often as a job copies its state: seen, and not written down."""
        self.state.watch(report.job_id).copies = {name: getattr(report, name) for name in _OF_COPIES}

    @_see.register
    def _(self, report: Uncopied) -> None:
        """Training does not notice: say it for whoever runs the cluster."""
        watch = self.state.watch(report.job_id)
        watch.copies = {**(watch.copies or dict.fromkeys(_OF_COPIES)), "lacking": report.why}
        self.state.log("not-copied", report.job_id, why=report.why)

    @_see.register
    def _(self, report: Ended) -> None:
        """No process of the job is left: its devices are free, those that failed are set aside for a while."""
        state = self.state
        job, watch = state.store.job(report.job_id), state.watch(report.job_id)
        held = set(watch.held) | set(job.target.devices if job.target else ())
        watch.busy_until_s, watch.snapshot = 0.0, report.snapshot
        watch.steps_seen.clear()
        watch.samples.clear()
        watch.stragglers.clear()
        for device in report.dead:
            state.down[device] = max(state.down.get(device, 0.0), state.clock() + self.device_hold_s)
            state.log("device-lost", job.id, device=str(device), noticed_s=report.noticed_s)
        state.hold(job.id, ())
        state.freed(held)
        if job.state not in ENDED:
            self._end(report)
        self._let_dependants_know(report)
        if state.store.job(job.id).state in ENDED:
            self.retire(watch)

    def _let_dependants_know(self, report: Ended) -> None:
        """Who waited for this job's devices may go on, unless they want what is lost; its own decisions are void."""
        state, why = self.state, f"{report.job_id} ended"
        for waiting in list(state.waiting):
            decision = waiting.decision
            waiting.after.discard(report.job_id)
            if decision.job_id == report.job_id or set(decision.devices) & set(report.dead):
                drop(state, waiting, why)

    def _end(self, report: Ended) -> None:
        state = self.state
        job, now = state.store.job(report.job_id), state.clock()
        match report.outcome:
            case Outcome.FINISHED:
                state.store.progress(job.id, job.generation, report.step)
                if job.spec.final_checkpoint is None:
                    self._finish(job.id, report.exit_code)
                else:
                    self._deliver(job, report)
            case Outcome.PREEMPTED:
                state.store.progress(job.id, job.generation, report.snapshot_step)
                sentence = f"its state is saved at step {report.snapshot_step}"
                if job.spec.rigid:
                    sentence = report.error or "it ended within its grace; it begins again from its own checkpoint"
                reason = Reason(ReasonCode.PREEMPT, sentence)
                state.change(job, JobState.QUEUED, reason, plan=None, target=None)
            case Outcome.LOST:
                self._lost(report)
            case Outcome.FAILED | Outcome.KILLED:
                reason = Reason(ReasonCode.FAILED, report.error or "its processes were ended")
                state.change(job, JobState.FAILED, reason, ended_s=now, target=None, exit_code=report.exit_code)

    def _finish(self, job_id: str, exit_code: int | None = None) -> None:
        job = self.state.store.job(job_id)
        reason = Reason(ReasonCode.FINISHED, "all ranks ended well" if job.spec.rigid else "all steps are done")
        now = self.state.clock()
        self.state.change(job, JobState.FINISHED, reason, ended_s=now, target=None, exit_code=exit_code)

    def _deliver(self, job: Job, report: Ended) -> None:
        """It has not ended before its final checkpoint is where its user wants it: a controller that is killed
        meanwhile finds it where it was, and delivers again."""
        watch = self.state.watch(job.id)

        def done(error: str | None) -> None:
            present = self.state.store.job(job.id)
            if present.state in ENDED:
                return  # cancelled meanwhile
            with self.state.store.together():
                if error is None:
                    self.state.log("final-checkpoint", job.id, path=job.spec.final_checkpoint)
                    self._finish(job.id)
                else:
                    sentence = f"all steps are done, but not the final checkpoint: {error}; its state {report.snapshot}"
                    failed = Reason(ReasonCode.FAILED, sentence)
                    self.state.change(present, JobState.FAILED, failed, ended_s=self.state.clock(), target=None)
            watch.busy_until_s = 0.0
            self.retire(watch)
            self.state.changed = True

        if report.snapshot is None or report.snapshot_step < job.spec.steps:
            done(report.error or "the last snapshot is not complete")
        else:
            watch.busy_until_s = self.state.clock() + DELIVERY_S
            self._afterwards.append(partial(self.deliver, job, report.snapshot, done))

    def _lost(self, report: Ended) -> None:
        state = self.state
        job = state.store.job(report.job_id)
        dead = ", ".join(map(str, report.dead)) or "a process"
        sentence = (
            f"lost {dead} at step {report.step}; goes on from step {report.snapshot_step}: {report.steps_lost} lost"
        )
        state.store.progress(job.id, job.generation, report.snapshot_step)
        job = state.store.job(job.id)
        recoveries, most = job.num_recoveries + 1, MAX_RECOVERIES
        code, changes = ReasonCode.DEVICE_LOST, {}
        if job.spec.rigid:
            sentence = f"{report.error}; begins again from its own checkpoint"
            failed = report.exit_code is not None
            code, most = (ReasonCode.RECOVER, job.spec.max_restarts) if failed else (code, most + job.spec.max_restarts)
            if failed:
                state.watch(job.id).hold_until_s = state.clock() + back_off_s(recoveries)
            if report.unreachable:
                until_s = changes["not_before_s"] = state.clock() + job.spec.outage_s
                state.watch(job.id).hold_until_s = until_s
        reason = Reason(code, sentence)
        job = state.change(
            job, JobState.RECOVERING, reason, plan=None, target=None, num_recoveries=recoveries, **changes
        )
        state.log("recovering", job.id, lost_steps=report.steps_lost, noticed_s=report.noticed_s, error=report.error)
        if recoveries > most:
            sentence = f"died {recoveries} times without a snapshot in between: {report.error}"
            if job.spec.rigid:
                sentence = f"failed after {recoveries - 1} restarts: {report.error}"
            reason = Reason(ReasonCode.FAILED, sentence)
            state.change(job, JobState.FAILED, reason, ended_s=state.clock(), exit_code=report.exit_code)


def cancel_dependants(state: State, job_id: str, why: str) -> None:
    """Drop the decisions that wait for `job_id`, which will not give up its devices."""
    for waiting in [waiting for waiting in state.waiting if job_id in waiting.after]:
        drop(state, waiting, why)


def drop(state: State, waiting: Waiting, why: str) -> None:
    """Forget an adopted decision, and in turn those that wait for its job; the next cycle decides anew."""
    if waiting not in state.waiting:
        return
    state.waiting.remove(waiting)
    state.changed = True
    job_id = waiting.decision.job_id
    state.log("decision-cancelled", job_id, action=waiting.decision.action, why=why)
    cancel_dependants(state, job_id, why)


def record_dict(record: Redeployment) -> dict[str, Any]:
    """A move's record as plain data."""
    return {
        "generation": record.generation,
        "reason": record.reason.code,
        "sentence": record.reason.sentence,
        "phase": record.phase,
        "old": record.old.layout.to_dict(),
        "new": record.new.layout.to_dict(),
        "old_devices": [str(device) for device in record.old.devices],
        "new_devices": [str(device) for device in record.new.devices],
        "cut_step": record.cut_step,
        "moved_bytes": record.moved_bytes,
        "network_bytes": record.network_bytes,
        "bound_bytes": record.bound_bytes,
        "pause_s": record.pause_s,
        "mode": record.mode,
        "prepare_lost_s": record.prepare_lost_s,
        "total_s": record.total_s,
        "phase_s": dict(record.phase_s),
        "error": record.error,
    }
