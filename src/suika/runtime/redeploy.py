"""One move of one job, driven from outside: prepare, cut, move and verify, commit, release; or abort. No torch.

Training goes on through prepare. There is one point of no return, the owner's compare-and-set in `_decide`: before it
every failure leads back to the old generation at the same step, after it only forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from suika.core.cluster import Cluster
from suika.core.decision import Reason
from suika.core.plan import Plan
from suika.core.redeployment import Mode, Phase, Redeployment
from suika.reshard.assignment import bound_bytes, inbound_bytes
from suika.reshard.state import JobShape
from suika.runtime import timing
from suika.runtime.events import AllStepsDoneError, Moving, Released
from suika.runtime.gang import DiedError, UnableError
from suika.runtime.messages import Message

if TYPE_CHECKING:
    from suika.runtime.coordinator import JobRun

Commit = Callable[[], bool]


class RefusedError(RuntimeError):
    """The move must not be committed: ranks disagree, or the owner's record has changed."""


class Move:
    """Recipe for one redeployment of `run` to `plan`. Old ranks hold the state, joiners are forked, leavers go."""

    def __init__(
        self, run: JobRun, plan: Plan, generation: int, reason: Reason, weights_first: bool, mode: Mode | None
    ) -> None:
        assert run.plan is not None
        self._weights_first, self._wish = weights_first, mode
        self._run, self._gang, self._limits = run, run.gang, run.limits
        self._old = dict(run.ranks)
        self._joiners = {d: run.spawn(d, generation) for d in plan.devices if d not in self._old}
        everyone = {**self._old, **self._joiners}
        self._everyone = list(everyone.values())
        self._new = {device: everyone[device] for device in plan.devices}
        self._leavers = {d: m for d, m in self._old.items() if d not in self._new}
        self._digest = ""
        self._back = False  # it is being called off: of whom it needed to go forward nobody is missed
        self._marks = [time.monotonic()]
        self._record = Redeployment(run.job_id, generation, run.plan, plan, reason)

    def run(self, commit: Commit) -> Redeployment:
        """The finished record. Raises `DiedError` if a rank was lost that the job cannot go on without."""
        try:
            self._prepare()
            self._cut()
            self._move()
            self._decide(commit)
        except (DiedError, UnableError, RefusedError, TimeoutError, AllStepsDoneError) as error:
            return self._abort(error)
        self._commit()
        self._release()
        return self._record

    def _prepare(self) -> None:
        """Joiners, groups, programs, the move's plan: beside the running steps, until all are ready with one digest."""
        self._enter(Phase.PREPARE)
        store = self._run.store()
        self._gather("ready", self._joiners.values(), self._limits.launch_s, generation=0)
        self._tell(
            "prepare",
            old_generation=self._run.generation,
            old=self._record.old.to_dict(),
            new=self._record.new.to_dict(),
            cluster=self._part_of_cluster().to_dict(),
            store=store,
            weights_first=self._weights_first,
            mode=self._wish,
        )
        self._record = replace(self._record, bound_bytes=self._bound_bytes())
        prepared = self._gather("prepared", self._everyone, self._limits.build_s)
        planned = {(message["digest"], message.get("mode", "keep")) for message in prepared}
        if len(planned) > 1:
            raise RefusedError(f"ranks planned different moves: {sorted(planned)}")
        ((self._digest, mode),) = planned
        self._record = replace(self._record, mode=mode, network_bytes=prepared[0]["network_bytes"])
        self._run.settle_snapshot()
        self._mark(Phase.PREPARE)

    def _bound_bytes(self) -> int:
        """The least that any placement of the new layout on the same devices would have to move."""
        old, new = self._record.old, self._record.new
        shape = JobShape.of(self._run.spec)
        return bound_bytes(inbound_bytes(shape, old, new.layout, new.devices, new.order))

    def _part_of_cluster(self) -> Cluster:
        """The nodes that the move touches, in the cluster's order."""
        names = {device.node for device in (*self._record.old.devices, *self._record.new.devices)}
        cluster = self._run.cluster
        return replace(cluster, nodes=tuple(node for node in cluster.nodes if node.name in names))

    def _cut(self) -> None:
        """The ranks vote in their next step's all-reduce and stop after the same one."""
        self._enter(Phase.CUT)
        self._tell("cut", digest=self._digest)
        steps = {message["step"] for message in self._gather("cut", self._old.values(), self._limits.cut_s)}
        if len(steps) > 1:
            raise RefusedError(f"ranks stopped after different steps: {sorted(steps)}")
        lost_s = timing.lost_s(self._run.times, self._marks[0])
        self._record = replace(self._record, cut_step=steps.pop(), prepare_lost_s=lost_s)
        self._mark(Phase.CUT)

    def _move(self) -> None:
        """State goes from device to device; every rank checks every cell that it holds afterwards."""
        self._enter(Phase.MOVE)
        verified = self._gather("verified", self._everyone, self._limits.move_s)
        self._record = replace(self._record, moved_bytes=sum(m["received_bytes"] for m in verified))
        self._mark(Phase.MOVE)
        verify_s = max(m["verify_s"] for m in verified)
        phase_s = self._record.phase_s
        phase_s |= {Phase.MOVE.value: phase_s[Phase.MOVE] - verify_s, Phase.VERIFY.value: verify_s}

    def _decide(self, commit: Commit) -> None:
        """The point of no return. A leaver may die from here on: what it held has been verified elsewhere."""
        while True:
            try:
                self._gang.drain()
                break
            except DiedError as death:
                if death.member.device in self._new:
                    raise
        if not commit():
            raise RefusedError("the owner's record of the job has changed")

    def _commit(self) -> None:
        self._run.adopt(self._record.new, self._record.generation, self._new)
        self._tell("commit", digest=self._digest)
        self._mark(Phase.COMMIT)
        self._enter(Phase.COMMIT)

    def _release(self) -> None:
        """Leavers go; their devices are free from now on."""
        try:
            self._gang.dismiss([m for m in self._leavers.values() if m.alive])
        except DiedError:  # of a rank that is needed: the job ends, and who has left already is no part of it
            if gone := tuple(device for device, member in self._leavers.items() if not member.alive):
                self._run.emit(Released(self._run.job_id, self._record.generation, gone))
            raise
        self._mark(Phase.RELEASE)
        self._record = replace(self._record, total_s=self._marks[-1] - self._marks[0])
        self._enter(Phase.RELEASE)
        if self._leavers:
            self._run.emit(Released(self._run.job_id, self._record.generation, tuple(self._leavers)))

    def _abort(self, error: Exception) -> Redeployment:
        """Back to the old generation at the same step: its groups and its state are as they were, or, in a lean move,
        carried back by all. Where that cannot be the job falls back to its snapshot."""
        self._back = True
        under_way = self._record.mode == "lean" and self._record.phase == Phase.MOVE
        if isinstance(error, DiedError) and (error.member.device in self._old or under_way):
            raise error
        if under_way and (isinstance(error, TimeoutError) or (isinstance(error, UnableError) and error.link)):
            raise error
        back = under_way and not (isinstance(error, UnableError) and error.alone)
        self._tell("abort", restore=back)
        if back:
            self._await_the_way_back(error)
        self._gang.kill(self._joiners.values())
        if self._joiners:
            self._run.emit(Released(self._run.job_id, self._record.generation, tuple(self._joiners)))
        with suppress(AllStepsDoneError):
            self._gather("resumed", self._old.values(), self._limits.build_s, complaint=None)
        total_s = time.monotonic() - self._marks[0]
        self._record = replace(self._record, error=str(error), total_s=total_s)
        self._enter(Phase.ABORTED)
        return self._record

    def _await_the_way_back(self, error: Exception) -> None:
        """Who fails on it leaves the state in two halves: a loss, like a link's, not a failure of the program."""
        try:
            self._gather("resumed", self._old.values(), self._limits.move_s, complaint=None)
        except UnableError as broken:
            raise UnableError(broken.member, f"{error}; then, on the way back, {broken}", link=True) from error

    def _gather(
        self, say: str, members: Any, timeout_s: float, generation: int | None = None, complaint: str | None = "unable"
    ) -> list[Message]:
        number = self._record.generation if generation is None else generation
        return self._gang.gather(say, number, members, timeout_s, self._check, complaint)

    def _check(self) -> None:
        self._run.check()
        if self._record.phase == Phase.PREPARE and not self._back and not self._run.store_alive:
            raise RefusedError("the rendezvous store died")

    def _tell(self, do: str, **content: Any) -> None:
        self._gang.tell([m for m in self._everyone if m.alive], do, generation=self._record.generation, **content)

    def _enter(self, phase: Phase) -> None:
        self._record = replace(self._record, phase=phase)
        self._run.emit(Moving(self._run.job_id, self._record.generation, self._record))

    def _mark(self, phase: Phase) -> None:
        """Note how long a phase took."""
        self._marks.append(time.monotonic())
        phase_s = {**self._record.phase_s, phase.value: self._marks[-1] - self._marks[-2]}
        self._record = replace(self._record, phase_s=phase_s)
