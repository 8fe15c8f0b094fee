"""`CommandRun`: a rigid job's gang seen from outside, for its owner what `JobRun` is for a training job. No torch.

All or nothing: the command starts once every rank has its place, and ends everywhere when one rank fails. It cannot be
moved live; who takes its devices sends a signal, waits a grace, and starts it again elsewhere. What it did until then
is its own checkpoint's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from suika.core.cluster import Cluster, Device
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.core.redeployment import Redeployment
from suika.runtime.adopt import Claim, OnRecord, ProcessName
from suika.runtime.command_exits import Exits, exit_code, first_failure, is_over
from suika.runtime.command_start import bring_up, spawn
from suika.runtime.events import Ended, JobEvent, Outcome, Released, Started
from suika.runtime.gang import DiedError, Gang, Limits, Member
from suika.runtime.messages import Message, Processes
from suika.runtime.run import Run

_LAST_WORDS_S = 5.0  # how long ranks may take to end after another has failed


class CannotError(RuntimeError):
    """The command (to this run) cannot be carried out; the job is as it was."""


class _Killed(Exception):  # noqa: N818  # no error: its owner's word
    pass


class _Over(Exception):  # noqa: N818  # every rank has ended, or one has failed
    pass


class _StopWanted(Exception):  # noqa: N818  # it is to give up its devices while it comes up
    pass


class _NoStartError(Exception):
    """A rank cannot start; `code` is what its command would have ended with."""

    def __init__(self, member: Member, said: Message) -> None:
        super().__init__(f"{member.device}: {said['error']}")
        self.code = exit_code(said["code"])


class CommandRun(Run):
    """One process per device of `spec.command`. Events as of `JobRun`."""

    def __init__(
        self,
        job_id: str,
        spec: JobSpec,
        processes: Processes,
        cluster: Cluster,
        on_event: Callable[[JobEvent], None],
        limits: Limits | None = None,
    ) -> None:
        self.spec, self.cluster = spec, cluster
        self.limits = limits or Limits()
        self.generation = 0
        self.plan: Plan | None = None
        self.ranks: dict[Device, Member] = {}
        self.step = 0  # 1 once it has finished
        self.emit = on_event
        super().__init__(job_id, Gang(job_id, processes, lambda member, message: None, self.limits))
        self._starting = False
        self._stop_wanted = False
        self.rest()

    # -- commands, from any thread ------------------------------------------------------------------------------------

    def start(self, plan: Plan, generation: int, snapshot: str | None = None) -> Future[int]:
        """Start the command on every device of `plan`. Resolves once it runs everywhere."""
        return self.command(lambda: self._start(plan, generation))

    def preempt(self, deadline_s: float | None = None) -> Future[Ended]:
        """Signal, grace (at most `deadline_s`), SIGKILL; then all devices are given up. What is still coming up, or
        setting up, has nothing to save and is ended at once."""
        self._stop_wanted = True
        return self.command(lambda: self._preempt(deadline_s))

    def redeploy(self, *_: Any) -> Future[Redeployment]:
        """Not of a command."""
        return _refused("a command cannot be moved live")

    def snapshot(self) -> Future[str]:
        """Not of a command."""
        return _refused("a command saves its state itself")

    def take_back(self, record: OnRecord, found: Mapping[str, int], claim: Claim) -> Future[int]:
        """Make `found` (process -> pid), which run already, the gang of this fresh run, as `adopt.take_back` does."""
        self.orders.taking_back = True
        return self.command(lambda: self._take_back(record, found, claim))

    # -- the thread of all jobs ---------------------------------------------------------------------------------------

    def _takes_no_time(self, event: Message, awaited: str | None = None) -> bool:
        if event.get("event") == "message":
            return event["process"] in self.gang.members and event["message"]["say"] == awaited
        return event.get("event") != "exit"

    # -- the job's thread ---------------------------------------------------------------------------------------------

    def _carry_out(self) -> bool:
        while not self.closed or self.orders:
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
            except CannotError as error:
                assert future is not None
                future.set_exception(error)
            except BaseException as error:
                self._end_surely(error)
                if future is not None:
                    future.set_exception(error)
        if self.gang.members:
            self._end(Outcome.KILLED, "ended by its owner")
        return True

    def check(self) -> None:
        """A kill; a rank that could not start; ranks that have ended: all of them, or one that failed."""
        if self.orders.heed_kill(runs=bool(self.gang.members)):
            raise _Killed
        if self._stop_wanted and self._starting:
            raise _StopWanted
        for member in self.ranks.values():
            if failed := self._said(member, "no-start"):
                raise _NoStartError(member, failed)
        if self.ranks and is_over(self._exits()):
            raise _Over

    def _said(self, member: Member, say: str) -> Message | None:
        return member.said.get((say, self.generation))

    def _exits(self) -> Exits:
        return {member: self._said(member, "exited") for member in self.ranks.values()}

    def _start(self, plan: Plan, generation: int) -> int:
        if self.ranks:
            raise CannotError(f"job {self.job_id} runs already")
        began_s = time.monotonic()
        self.generation, self.plan, self._starting = generation, plan, True
        self.ranks = {device: spawn(self.gang, self.spec, generation, device) for device in plan.devices}
        bring_up(self.gang, self.spec, generation, self.ranks, self.check)
        self._starting = False
        self.emit(Started(self.job_id, generation, 0, time.monotonic() - began_s, plan.devices))
        return 0

    def _preempt(self, deadline_s: float | None) -> Ended:
        if not self.ranks:
            self._stop_wanted = False  # it is not for who starts next
            raise CannotError(f"job {self.job_id} does not run")
        grace_s = self.spec.preemption.grace_s if deadline_s is None else min(self.spec.preemption.grace_s, deadline_s)
        begun = [member for member in self.ranks.values() if self._said(member, "running")]
        running = [member for member in begun if not self._said(member, "exited")]
        self.gang.tell(running, "signal", signal=self.spec.preemption.signal, grace_s=grace_s)
        self._await_exits(begun, grace_s + self.limits.end_s)
        codes = [said["code"] if (said := self._said(m, "exited")) else None for m in begun]
        late = sum(code is None or code == -9 for code in codes)
        error = f"{late} of {len(codes)} ranks were still there after {grace_s:.0f} s" if late else None
        return self._end(Outcome.PREEMPTED, error)

    def _await_exits(self, members: list[Member], timeout_s: float) -> None:
        """Until the programs of `members` are over, or the time is; an owner's kill is left for later."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.orders.killed:
            if all(self._said(member, "exited") or not member.alive for member in members):
                return
            with suppress(DiedError):  # one more that has ended
                self.gang.pump(deadline)

    def _take_back(self, record: OnRecord, found: Mapping[str, int], claim: Claim) -> int:
        self.orders.taking_back = False
        self.generation, self.plan = record.generation, record.plan
        for process, pid in found.items():
            device = ProcessName.parse(process).device
            member = self.gang.members[process] = Member(process, device, time.monotonic(), pid=pid)
            if device in record.plan.devices and process.split(".")[1] == str(record.generation):
                assert device is not None
                self.ranks[device] = member
            claim(process, self.gang.post)
        missing = [device for device in record.plan.devices if device not in self.ranks]
        if not record.started:
            raise DiedError(Member(self.job_id, None, 0.0), "was starting when its controller ended", 0.0)
        if missing:
            gone = Member(f"{self.job_id} on {missing[0]}", missing[0], 0.0, unreachable=True)
            raise DiedError(gone, "was gone at the restart", 0.0)
        return 0

    # -- the end ------------------------------------------------------------------------------------------------------

    def _end_with_codes(self) -> None:
        """Every rank is over, or one has failed: then the others are told to end, and soon ended."""
        exits = self._exits()
        failure = first_failure(exits)
        if failure is None:
            self.step = 1
            self._end(Outcome.FINISHED, None, exit_code=0)
            return
        rest = [member for member, said in exits.items() if not said]
        self.gang.tell(rest, "signal", signal="SIGTERM", grace_s=min(_LAST_WORDS_S, self.spec.preemption.grace_s))
        self._await_exits(rest, _LAST_WORDS_S + self.limits.end_s)
        how, code = failure
        self._end(Outcome.LOST, how, exit_code=code)

    def _end_surely(self, error: BaseException) -> None:
        """Whatever comes between, its owner hears of one end."""
        try:
            self._end_for(error)
        except BaseException as again:
            self._end(Outcome.LOST, str(again) or repr(again))

    def _end_for(self, error: BaseException) -> None:
        if isinstance(error, _StopWanted):
            self._preempt(0.0)
        elif isinstance(error, _Over):
            self._end_with_codes()
        elif isinstance(error, _Killed):
            self._end(Outcome.KILLED, "ended by its owner")
        elif isinstance(error, DiedError):
            dead = (error.member.device,) if error.member.device else ()
            self._end(Outcome.LOST, str(error), dead, noticed_s=error.noticed_s, unreachable=error.member.unreachable)
        elif isinstance(error, _NoStartError):
            self._end(Outcome.FAILED, str(error), exit_code=error.code)
        else:
            self._end(Outcome.FAILED, str(error) or repr(error))

    def _end(self, outcome: Outcome, error: str | None, dead: tuple[Device, ...] = (), **more: Any) -> Ended:
        """Kill what is left, then say how it ended."""
        self.gang.kill(self.gang.members.copy().values())
        self._starting = self._stop_wanted = False
        devices, self.ranks = tuple(self.ranks), {}
        ended = Ended(self.job_id, self.generation, outcome, self.step, None, 0, error, dead, **more)
        self.emit(Released(self.job_id, self.generation, devices))
        self.emit(ended)
        return ended


def _refused(why: str) -> Future[Any]:
    refused: Future[Any] = Future()
    refused.set_exception(CannotError(why))
    return refused
