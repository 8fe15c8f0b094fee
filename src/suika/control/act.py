"""The active half of the loop: ask the policy, adopt what it decides, carry out what can be carried out now.

decide      snapshot -> cycle -> adopted decisions, and for every waiting job why it waits
dispatch    start each adopted decision whose devices nobody else holds any more
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from suika.control.decider import Decide, Decided
from suika.control.state import Run, State, Waiting
from suika.control.store import News, StaleWriteError, StoreAwayError
from suika.control.views import Pricing, take_snapshot
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.errors import SpecError
from suika.core.job import Job, JobState
from suika.core.plan import Plan
from suika.core.snapshot import Snapshot
from suika.runtime.events import JobEvent
from suika.schedule.cycle import Step

Post = Callable[[Callable[[], None]], None]


class Launcher(Protocol):
    """Brings a job's processes up."""

    def prepare(self, job: Job) -> Path:
        """The job's data, ready to be read; may take long and is called off the loop. Raises `SpecError`."""
        ...

    def run(self, job: Job, data: Path, on_event: Callable[[JobEvent], None]) -> Run: ...


class Actor:
    """`post` hands a call to the loop's thread; `background` runs one elsewhere and gives its future."""

    def __init__(
        self,
        state: State,
        pricing: Pricing,
        decide: Decide,
        launcher: Launcher,
        on_event: Callable[[JobEvent], None],
        post: Post,
        background: Callable[..., Future[Any]],
        on_failed_move: Callable[[str, str], None],
    ) -> None:
        self.state = state
        self.pricing = pricing
        self.cycle = decide
        self.launcher = launcher
        self.on_event = on_event
        self.post = post
        self.background = background
        self.on_failed_move = on_failed_move

    # -- decide -------------------------------------------------------------------------------------------------------

    def decide(self) -> Decided:
        """One cycle of the scheduler; its decisions are adopted, predecessors first."""
        began_s = time.perf_counter()
        snapshot = take_snapshot(self.state, self.pricing)
        result = self.cycle(snapshot)
        taken_s = time.perf_counter() - began_s
        release_s: dict[str, float] = {}
        with self.state.store.together():  # what one cycle says is written at once: a write waits for the disk
            adopted = [self._adopt(snapshot, step, release_s) for step in result.steps]
            for job_id, reason in result.waits.items():
                self._say_why_it_waits(job_id, reason)
            if result.steps or result.rejected:
                rejected = {decision.job_id: str(reason) for decision, reason in result.rejected}
                self.state.log("cycle", taken_s=taken_s, decisions=len(result.steps), rejected=rejected)
        self.state.waiting += adopted
        return result

    def _adopt(self, snapshot: Snapshot, step: Step, release_s: dict[str, float]) -> Waiting:
        decision, now = step.decision, snapshot.now_s
        view, job = snapshot.job_of[decision.job_id], self.state.store.job(decision.job_id)
        plan, pause_s = self._plan(job, decision), None
        ready_s = max([step.not_before_s, now, *(release_s.get(other, now) for other in step.after)])
        if plan is None:
            release_s[job.id] = ready_s + snapshot.move_cost.typical(view)
        else:
            move = snapshot.move_cost(view, plan.layout, plan.devices)
            pause_s, release_s[job.id] = move.pause_s, ready_s + move.release_s
        self.state.log(
            "decided",
            job.id,
            action=decision.action,
            reason=decision.reason.code,
            sentence=decision.reason.sentence,
            layout=plan.layout.to_dict() if plan else None,
            devices=[str(device) for device in plan.devices] if plan else [],
            after=list(step.after),
            predicted_pause_s=pause_s,
        )
        return Waiting(decision, plan, set(step.after), release_s[job.id])

    def _plan(self, job: Job, decision: Decision) -> Plan | None:
        """The decision as a plan, validated here once."""
        if decision.layout is None:
            return None
        shape = (job.spec.model, job.spec.global_batch, job.spec.sequence_length)
        return Plan.checked(decision.layout, decision.devices, *shape, self.state.cluster)

    def _say_why_it_waits(self, job_id: str, reason: Reason) -> None:
        job = self.state.store.job(job_id)
        if job.not_before_s is not None and job.not_before_s > self.state.clock():
            reason = Reason(ReasonCode.DEVICE_LOST, "what ran of it on a lost node may run on for its outage_s")
        unsatisfiable = reason.code is ReasonCode.UNSATISFIABLE
        if job.state is JobState.QUEUED and unsatisfiable:
            self.state.change(job, JobState.UNSATISFIABLE, reason)
        elif job.state is JobState.RECOVERING or (job.state is JobState.UNSATISFIABLE and not unsatisfiable):
            self.state.change(job, JobState.QUEUED, reason)
        elif job.state in (JobState.QUEUED, JobState.UNSATISFIABLE) and job.reason != reason:
            told = News(self.state.clock(), "waits", {"reason": reason.code, "sentence": reason.sentence})
            self.state.store.put(job.update(reason=reason), told if job.reason.code != reason.code else None)

    # -- dispatch -----------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Carry out every adopted decision that waits for nobody and whose devices are free of others."""
        for waiting in list(self.state.waiting):
            if waiting.after or self._others_are_on(waiting.decision):
                continue
            self.state.waiting.remove(waiting)
            job = self.state.store.job(waiting.decision.job_id)
            match waiting.decision.action:
                case Action.START:
                    self._start(job, waiting)
                case Action.REDEPLOY if job.spec.rigid:  # to other devices by a stop and a start
                    self.stop(job, waiting.decision.reason)
                case Action.REDEPLOY:
                    self._redeploy(job, waiting)
                case Action.PREEMPT:
                    self.stop(job, waiting.decision.reason)

    def _others_are_on(self, decision: Decision) -> bool:
        """Whether another job's processes are, or may still be, on the decision's devices."""
        state, wanted = self.state, set(decision.devices)
        held = (watch.held for job_id, watch in state.watches.items() if job_id != decision.job_id)
        return not wanted.isdisjoint(state.releasing) or any(not wanted.isdisjoint(devices) for devices in held)

    def _start(self, job: Job, waiting: Waiting) -> None:
        plan, state, reason = waiting.plan, self.state, waiting.decision.reason
        assert plan is not None
        if job.state is JobState.UNSATISFIABLE:
            job = state.change(job, JobState.QUEUED, reason)
        watch, generation = state.watch(job.id), job.last_generation + 1
        # The generation is on record before any process bears its number. What cannot be written has not been begun.
        state.change(job, JobState.STARTING, reason, plan=plan, generation=generation, last_generation=generation)
        watch.busy_until_s = state.clock() + watch.launch_s
        state.hold(job.id, plan.devices)
        if watch.run is not None:
            self._ask_to_start(job.id, generation)
        else:
            prepared = self.background(self.launcher.prepare, job)
            prepared.add_done_callback(lambda done: self.post(lambda: self._prepared(job.id, generation, done)))

    def _prepared(self, job_id: str, generation: int, prepared: Future[Path]) -> None:
        job, watch = self.state.store.job(job_id), self.state.watch(job_id)
        if job.state is not JobState.STARTING or job.generation != generation:
            return  # cancelled meanwhile
        error = prepared.exception()
        if error is not None:
            sentence = str(error) if isinstance(error, SpecError) else f"its data cannot be prepared: {error}"
            devices = watch.held
            self.state.hold(job_id, ())
            failed = Reason(ReasonCode.FAILED, sentence)
            self.state.change(job, JobState.FAILED, failed, ended_s=self.state.clock())
            self.state.freed(devices)
            return
        watch.run = self.launcher.run(job, prepared.result(), self.on_event)
        self._ask_to_start(job_id, generation)

    def _ask_to_start(self, job_id: str, generation: int) -> None:
        job, watch = self.state.store.job(job_id), self.state.watch(job_id)
        assert watch.run is not None
        assert job.plan is not None
        watch.run.start(job.plan, generation, watch.snapshot)

    def _redeploy(self, job: Job, waiting: Waiting) -> None:
        plan, state, reason = waiting.plan, self.state, waiting.decision.reason
        watch, generation = state.watch(job.id), job.last_generation + 1
        assert plan is not None
        assert job.plan is not None
        assert watch.run is not None
        state.change(job, JobState.REDEPLOYING, reason, target=plan, last_generation=generation)
        watch.busy_until_s = waiting.expected_s
        state.hold(job.id, {*job.plan.devices, *plan.devices})
        state.give_up(set(job.plan.devices) - set(plan.devices), waiting.expected_s)
        moved = watch.run.redeploy(plan, generation, reason, lambda: self._commit(job.id, plan, generation))
        moved.add_done_callback(lambda done: self._report_failure(job.id, done))

    def _commit(self, job_id: str, plan: Plan, generation: int) -> bool:
        """The point of no return, on the job's thread: one compare-and-set. False: it was cancelled meanwhile, or
        cannot be written."""
        job = self.state.store.job(job_id)
        if job.state is not JobState.REDEPLOYING or job.last_generation != generation:
            return False
        try:
            self.state.store.put(job.update(plan=plan, generation=generation, num_moves=job.num_moves + 1))
        except (StaleWriteError, StoreAwayError):
            return False
        return True

    def _report_failure(self, job_id: str, moved: Future[Any]) -> None:
        """A command that could not even run reports no event: say so to the loop. (A death reports its own.)"""
        error = moved.exception() if not moved.cancelled() else None
        if error is not None:
            self.post(lambda: self.on_failed_move(job_id, str(error)))

    def stop(self, job: Job, reason: Reason, deadline_s: float | None = None) -> None:
        """Have a running job save its state and give up its devices, within `deadline_s` if that is given."""
        state, watch = self.state, self.state.watch(job.id)
        assert watch.run is not None
        stops_s = job.spec.preemption.grace_s if job.spec.rigid else watch.launch_s
        state.change(job, JobState.PREEMPTING, reason)
        watch.busy_until_s = state.clock() + stops_s
        state.give_up(watch.held, watch.busy_until_s)
        watch.run.preempt(deadline_s)
