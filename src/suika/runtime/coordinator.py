"""`JobRun`: one job's processes seen from outside. It starts, moves, saves and ends them. No torch.

Commands return futures and are carried out one after the other on the job's own thread; in between, one thread listens
to the ranks of all jobs (`turns`). When a process that the present generation needs is lost, everything of the job is
ended and `Ended(LOST)` names the snapshot to go on from: who gets which devices then is the scheduler's decision, not
ours.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from suika.core.cluster import Cluster, Device
from suika.core.decision import Reason
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.core.redeployment import Mode, Redeployment
from suika.core.sample import StepSample
from suika.reshard.predict import pace_of
from suika.runtime import copysets, outside, setup, timing
from suika.runtime.copies import Copies
from suika.runtime.events import (
    AllStepsDoneError,
    Ended,
    JobEvent,
    Measured,
    Outcome,
    Released,
    Sampled,
    Started,
    StepDone,
)
from suika.runtime.gang import RANK_ENTRY, STORE_ENTRY, DiedError, Gang, KilledError, Limits, Member, UnableError
from suika.runtime.keeper import SnapshotKeeper
from suika.runtime.messages import Message, Processes
from suika.runtime.redeploy import Commit, Move
from suika.runtime.run import Run
from suika.runtime.timing import StepTimes
from suika.runtime.turns import Wait

PROGRAM = "suika.train.program:build"


class NotRunningError(RuntimeError):
    """The command needs a running job, or cannot be carried out now; the job is as it was."""


class DeadlineError(RuntimeError):
    """The time that a notice gave is over."""


class JobRun(Run):
    """Processes of the job `job_id`. `folder` keeps its snapshots; `on_event` is called on the job's thread, or on that
    of all jobs, and must not take long.

    Generation numbers are the caller's: persisted before use, never used twice, aborted ones included.
    """

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        processes: Processes,
        cluster: Cluster,
        folder: Path,
        data_path: str,
        on_event: Callable[[JobEvent], None],
        program: str = PROGRAM,
        limits: Limits | None = None,
    ) -> None:
        self.spec = spec
        self.limits = limits or Limits()
        if outside.is_needed(spec.environment):  # each process imports torch by itself
            self.limits = replace(self.limits, launch_s=3 * self.limits.launch_s)
        self.generation = 0
        self.plan: Plan | None = None  # of the running generation
        self.ranks: dict[Device, Member] = {}  # of the running generation
        self.step = 0  # steps done
        self.times = StepTimes()
        self.emit = on_event
        self.cluster = cluster
        self._launch = {
            "job_id": job_id,
            "spec": spec.model_dump(mode="json"),
            "program": program,
            "data_path": data_path,
            "snapshots": str(folder / "snapshots"),
            "variables": dict(spec.environment.variables),
        }
        super().__init__(job_id, Gang(job_id, processes, self._hear, self.limits))
        self.keeper = SnapshotKeeper(self.gang)
        self.copies = Copies(job_id, spec, processes, self.gang, on_event)
        self.gang.hear_other = self.copies.hear
        self._store: Member | None = None
        self._token = secrets.token_hex(16)
        self._unmeasured: tuple[Redeployment, StepTimes] | None = None  # a move and its old generation's steps
        self._ended: Ended | None = None  # how it ended, once it has
        self.rest()

    # -- commands, from any thread ------------------------------------------------------------------------------------

    def start(self, plan: Plan, generation: int, snapshot: str | None = None) -> Future[int]:
        """Fork the ranks of `plan`, fresh or from `snapshot`. Resolves with the steps done after the first step.

        `snapshot`: as an event named it. If copies in memory are gone meanwhile, the newest one on disk is taken.
        """
        return self.command(lambda: self._start(plan, generation, snapshot))

    def redeploy(
        self,
        plan: Plan,
        generation: int,
        reason: Reason,
        commit: Commit = lambda: True,
        weights_first: bool | None = None,
        mode: Mode | None = None,
    ) -> Future[Redeployment]:
        """Move the running job to `plan`. `commit` is the owner's compare-and-set, called once, when all is verified.

        `weights_first`: compute the next gradients while masters and moments stream; None: where the platform gains by
        it (`reshard.predict.pace_of`). `mode`: None for "keep" where both states fit side by side, else "lean"; a death
        or a broken link on the way then costs the steps since the last snapshot.

        Resolves with the record: phase RELEASE if it was committed, ABORTED (with `error`) if the old generation
        goes on. The pause is known some steps later: see `Measured`.
        """
        first = pace_of(self.cluster).weights_first if weights_first is None else weights_first
        return self.command(lambda: self._redeploy(plan, generation, reason, commit, first, mode))

    def snapshot(self) -> Future[str]:
        """Save the state after the same step on all ranks. Resolves with the snapshot's path."""
        return self.command(self._snapshot)

    def preempt(self, deadline_s: float | None = None) -> Future[Ended]:
        """Save the state at one agreed step, then give up all devices.

        `deadline_s`: seconds until the devices are needed, whatever the job is doing now. What is not saved by then is
        given up: the result names the last complete snapshot, and `error` says so.
        """
        if deadline_s is not None:
            self.gang.stop_by_s = time.monotonic() + deadline_s
        return self.command(self._preempt)

    # -- the thread of all jobs ---------------------------------------------------------------------------------------

    def _takes_no_time(self, event: Message, awaited: str | None = None) -> bool:
        if event.get("event") != "message":
            return event.get("event") != "exit" and event.get("process", "") not in self.copies.holders.alive
        message = event["message"]
        if event["process"] not in self.gang.members or message["say"] not in ("step", "sample", awaited):
            return False
        return message["say"] != "step" or self.copies.has_time(message["step"], self.generation)

    # -- the job's thread ---------------------------------------------------------------------------------------------

    def _carry_out(self) -> bool:
        while not self.closed:
            future = None
            try:
                self._hand_back()
                self.check()
                if self.orders:
                    future, action = self.orders.next()
                    future.set_result(action())
                elif self.gang.has_news:
                    self.gang.pump()
                else:
                    return False
            except AllStepsDoneError:
                try:
                    self._end_orderly()
                except BaseException as error:  # somebody died over the last snapshot, or time ran out
                    self._end_badly(error)
                if future is not None:
                    future.set_exception(NotRunningError(f"job {self.job_id} ended meanwhile"))
            except NotRunningError as error:
                assert future is not None
                future.set_exception(error)
            except BaseException as error:  # a dead process; or a defect, and then no job may be left half-run
                self._end_badly(error)
                if future is not None:
                    future.set_exception(error)
        if self.gang.members:
            self._end_badly(KilledError("ended by its owner"))
        self.copies.end()
        self.orders.cancel_all()
        return True

    def check(self) -> None:
        """What can come between at any time: the owner's kill, a rank's failure, the end of the last step."""
        if self.orders.heed_kill(runs=bool(self.gang.members)):
            raise KilledError("ended by its owner")
        if time.monotonic() > self.gang.stop_by_s:
            self.gang.stop_by_s = math.inf
            if self.gang.members:
                raise DeadlineError("the state could not be saved in time")
        if any(("failed", self.generation) in m.said for m in self.ranks.values()):
            self.gang.blame("failed", self.generation, self.ranks.values())
        if any(("ended", self.generation) in m.said for m in self.ranks.values()):
            raise AllStepsDoneError("all steps were done before the cut")

    def _hear(self, member: Member, message: Message) -> None:
        """What ranks say unasked: their steps and their snapshots."""
        # A snapshot that became complete while the job moved on is one all the same: older ones may be gone by now.
        if message.get("generation") != self.generation and message["say"] != "published":
            return
        if message["say"] == "step":
            self.step = message["step"]
            self.times.ended(message["step"], message["at_s"])
            self.gang.vouch(self.ranks.values(), self.times.latest_s)
            fields = {name: message[name] for name in ("step", "loss", "grad_norm", "lr", "num_tokens", "at_s")}
            self.emit(StepDone(self.job_id, self.generation, **fields))
            self._measure(final=False)
            assert self.plan is not None
            self.copies.stepped(self.step, self.generation, self.plan, self.ranks)
        elif message["say"] == "unheld":
            self.copies.complain(message)
        elif message["say"] == "sample":
            self.emit(Sampled(self.job_id, self.generation, StepSample.from_dict(message["sample"])))
        elif message["say"] in ("written", "unwritten", "published"):
            event = self.keeper.hear(self.ranks, member, message)
            if event is not None:
                self.emit(event)

    # -- the commands -------------------------------------------------------------------------------------------------

    def _start(self, plan: Plan, generation: int, snapshot: str | None) -> int:
        if self.ranks:
            raise NotRunningError(f"job {self.job_id} runs already")
        began_s = time.monotonic()
        limits, self.generation, self.plan, self.times = self.limits, generation, plan, StepTimes()
        recall, snapshot, fell_back = self._source(snapshot)
        if recall is None:
            self.copies.forsake(generation)
        self._prepare_nodes(plan, generation)
        store = self.store()
        self.ranks = {device: self.spawn(device, generation) for device in plan.devices}
        self.gang.gather("ready", 0, self.ranks.values(), limits.launch_s, self.check)
        order = {"generation": generation, "plan": plan.to_dict(), "store": store, "snapshot": snapshot}
        self.gang.tell(self.ranks.values(), "start", recall=recall, **order)
        source = None
        if recall is not None:
            fell_back = self._recall(generation, snapshot)
            if fell_back is None:
                source = recall["generation"], recall["step"]
            else:
                self.copies.forsake(generation)
        running = self.gang.gather("running", generation, self.ranks.values(), limits.build_s, self.check)
        self.step = running[0]["step"]
        if snapshot is not None and source is None:
            self.keeper.newest = (snapshot, self.step)
        self.copies.begin(generation, self.step, source)
        self._await_first_step()
        launch_s, copies = time.monotonic() - began_s, copysets.name_of(source) if source is not None else None
        self.emit(Started(self.job_id, generation, running[0]["step"], launch_s, plan.devices, fell_back, copies))
        return self.step

    def _source(self, snapshot: str | None) -> tuple[dict[str, Any] | None, str | None, str | None]:
        """Where the state comes from: copies in memory or None, the snapshot on disk (behind copies: to fall back on)
        or None, and why copies that were named are not taken."""
        if not copysets.is_name(snapshot):
            return None, snapshot, None
        found, on_disk = self.copies.best(), self.keeper.newest[0]
        if found is None:
            return None, on_disk, f"{snapshot}: holders are gone, and parts of the state with them"
        return self.copies.recall_order(found), on_disk, None

    def _recall(self, generation: int, on_disk: str | None) -> str | None:
        """All ranks have the state from memory, or all take it from disk; why, if so."""
        ranks, fell_back = self.ranks.values(), None
        try:
            self.gang.gather("filled", generation, ranks, self.limits.build_s, self.check, complaint="unfilled")
        except UnableError as error:
            fell_back = str(error)
        self.gang.tell(ranks, "go", recalled=fell_back is None, snapshot=on_disk)
        return fell_back

    def _await_first_step(self) -> None:
        deadline = time.monotonic() + self.limits.first_step_s
        wait = Wait(lambda: bool(self.times.ends_s), deadline, self.check, "step")
        while not self.times.ends_s:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no first step within {self.limits.first_step_s:.0f} s")
            self.gang.rest(wait)

    def _redeploy(
        self, plan: Plan, generation: int, reason: Reason, commit: Commit, weights_first: bool, mode: Mode | None
    ) -> Redeployment:
        self._need_running()
        assert generation > self.generation, f"generation {generation} after {self.generation}"
        self._measure(final=True)
        try:
            self._prepare_nodes(plan, generation)
        except (setup.SetUpError, DiedError, TimeoutError) as error:
            if isinstance(error, DiedError) and error.member.device is not None:
                raise  # a rank of the running generation
            raise NotRunningError(f"a node cannot be prepared: {error}") from error
        old_times = self.times
        record = Move(self, plan, generation, reason, weights_first, mode).run(commit)
        self._tidy_store()
        if record.error is None:
            self._unmeasured = (record, old_times)
            self._measure(final=False)
        return record

    def adopt(self, plan: Plan, generation: int, ranks: dict[Device, Member]) -> None:
        """The move is committed: from now on these are the job's ranks."""
        self.plan, self.generation, self.ranks, self.times = plan, generation, ranks, StepTimes()
        self.keeper.forget()
        for member in ranks.values():
            member.forget(generation)

    def _snapshot(self) -> str:
        self._need_running()
        self.settle_snapshot()
        before = self.keeper.newest
        self.keeper.error = None
        self.gang.tell(self.ranks.values(), "snapshot")
        deadline = time.monotonic() + self.limits.save_s
        while self.keeper.newest == before:
            self.check()
            if self.keeper.error is not None:
                raise NotRunningError(f"the snapshot failed: {self.keeper.error}")
            if time.monotonic() > deadline:
                raise NotRunningError(f"no snapshot within {self.limits.save_s:.0f} s")
            self.gang.pump()
        path, _ = self.keeper.newest
        assert path is not None
        return path

    def _preempt(self) -> Ended:
        if not self.ranks and self._ended is not None and self._ended.outcome == Outcome.PREEMPTED:
            return self._ended  # the deadline came before its turn
        if not self.ranks:
            self.gang.stop_by_s = math.inf  # it is not for who starts next
        self._need_running()
        self.gang.tell(self.ranks.values(), "preempt")
        try:
            return self._end_orderly()
        except DeadlineError as error:
            return self._end_badly(error)

    def _check_alive(self) -> None:
        with suppress(AllStepsDoneError):
            self.check()

    def _need_running(self) -> None:
        if not self.ranks:
            raise NotRunningError(f"job {self.job_id} does not run")

    # -- processes ----------------------------------------------------------------------------------------------------

    def _prepare_nodes(self, plan: Plan, generation: int) -> None:
        """Set up the nodes of `plan` on which no rank of this job runs."""
        if setup.is_needed(self.spec.environment):
            there = {device.node for device in self.ranks}
            fresh = [device for device in plan.devices if device.node not in there]
            setup.set_up(self.gang, self.spec, generation, fresh, self.check)

    def _fork(self, name: str, node: str, device: Device | None, entry: str, launch: dict[str, Any]) -> Member:
        """In the agent's own environment, or in the job's."""
        inside = self.spec.environment
        if not outside.is_needed(inside):
            return self.gang.spawn(name, node, device, entry, launch)
        launch |= {"entry": entry, "environment": inside.model_dump(mode="json")}
        launch["variables"] = self._launch["variables"]
        return self.gang.spawn(name, node, device, outside.ENTRY, launch, imports=True)

    def store(self) -> dict[str, Any]:
        """Address of the job's rendezvous store; a new one if there is none or it died."""
        store = self._store
        if store is None or not store.alive:
            node = self.plan.devices[0].node if self.plan else ""
            name = f"{self.job_id}.store.{secrets.token_hex(4)}"
            store = self._store = self._fork(name, node, None, STORE_ENTRY, {"token": self._token})
        (said,) = self.gang.gather("store", 0, [store], self.limits.launch_s, complaint="failed")
        return {"host": said["host"], "port": said["port"], "token": self._token}

    @property
    def store_alive(self) -> bool:
        return self._store is not None and self._store.alive

    def _tidy_store(self) -> None:
        if self._store is not None:
            self.gang.tell([self._store], "keep", prefix=f"{self.job_id}/{self.generation}/")

    def spawn(self, device: Device, generation: int) -> Member:
        name = f"{self.job_id}.{generation}.{device}"
        launch = {**self._launch, "device": str(device)}
        return self._fork(name, device.node, device, RANK_ENTRY, launch)

    def settle_snapshot(self) -> None:
        """Let a snapshot that is being written become complete."""
        deadline = time.monotonic() + self.limits.save_s
        while self.keeper.busy and time.monotonic() < deadline:
            self._check_alive()
            self.gang.pump()

    def _measure(self, final: bool) -> None:
        """Complete the last move's record once the new layout's median step is known, or will not get better."""
        if self._unmeasured is None or not (final or self.times.settled):
            return
        record, old_times = self._unmeasured
        self._unmeasured = None
        record = replace(record, pause_s=timing.pause_s(old_times, self.times))
        self.emit(Measured(self.job_id, record.generation, record))

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_orderly(self) -> Ended:
        """All ranks stopped after the same step: let the last snapshot become complete, then let them go."""
        ended = self.gang.gather("ended", self.generation, self.ranks.values(), self.limits.save_s, self._check_alive)
        self.settle_snapshot()
        self.gang.dismiss(self.gang.members.copy().values())
        error = self.keeper.error
        return self.ended(Outcome(ended[0]["outcome"]), error and f"the last snapshot failed: {error}")

    def _end_badly(self, error: BaseException) -> Ended:
        """Kill whatever is left, then say what was lost."""
        dead: tuple[Device, ...] = ()
        outcome, noticed_s = Outcome.FAILED, 0.0
        if isinstance(error, DeadlineError):
            outcome = Outcome.PREEMPTED
        elif isinstance(error, KilledError):
            outcome = Outcome.KILLED
        elif isinstance(error, DiedError | TimeoutError) or (isinstance(error, UnableError) and error.link):
            outcome = Outcome.LOST
        if isinstance(error, DiedError):
            dead = (error.member.device,) if error.member.device else ()
            noticed_s = error.noticed_s
        joiners = {m.device: m for m in self.gang.members.values() if m.device is not None}
        self.ranks = {**self.ranks, **joiners}
        self.gang.kill(self.gang.members.copy().values())
        return self.ended(outcome, str(error) or repr(error), dead, noticed_s)

    def _to_go_on_from(self, outcome: Outcome) -> tuple[str | None, int]:
        """The newest snapshot and its step: on disk, or after a loss the copies in memory, which are kept for it."""
        path, step = self.keeper.newest
        best = self.copies.best() if outcome is Outcome.LOST else None
        if best is not None and best.step >= step:
            return best.name, best.step
        self.copies.end()
        return path, step

    def ended(
        self, outcome: Outcome, error: str | None, dead: tuple[Device, ...] = (), noticed_s: float = 0.0
    ) -> Ended:
        """No process is left: say so."""
        self._measure(final=True)
        devices, self.ranks, self._store = tuple(self.ranks), {}, None
        self.keeper.forget()
        path, step = self._to_go_on_from(outcome)
        ended = Ended(self.job_id, self.generation, outcome, self.step, path, step, error, dead, noticed_s)
        self._ended, self.gang.stop_by_s = ended, math.inf
        self.emit(Released(self.job_id, self.generation, devices))
        self.emit(ended)
        return ended
