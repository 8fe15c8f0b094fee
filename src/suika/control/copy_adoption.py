"""Holders of copies in memory that have outlived their controller: each goes to the job whose state it has, or ends.

The store does not know which copies there are; nodes say which holders they have, and holders what they hold. What the
store knows is from which copies a job was last started, and how far a job that waits had come: if that is further than
its newest snapshot, its state was in memory when its ranks were lost. Such a job is not started before its copies were
found, or all nodes are here without them, or a lease is over; then it goes back to its snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Container
from concurrent.futures import Future

from suika.control.agents import AgentHub
from suika.control.controller import Controller
from suika.control.roster import Roster
from suika.control.store import Which
from suika.core.job import HOLDS_DEVICES, Job, JobState
from suika.runtime.adopt import Answer, ProcessName, join_copies, take_back_copies
from suika.runtime.coordinator import JobRun
from suika.runtime.copysets import Lineage, key_of

_LAUNCHED = Which(frozenset(("launched",)), last=True)
_HOLDER = ".holder."
_AGAIN_S = 2.0  # between looks
_MARGIN_S = 60.0  # beyond its time a job is not started by accident before somebody has looked once more


class CopyAdoption:
    """On the controller's loop."""

    def __init__(self, controller: Controller, roster: Roster, hub: AgentHub, besides: Container[str]) -> None:
        """`besides`: jobs that will be given their holders together with their ranks."""
        self._controller, self._state = controller, controller.state
        self._roster, self._hub, self._besides = roster, hub, besides
        self._waiting: dict[str, float] = {}  # jobs that are to start from copies -> until when they wait for them
        self._asked: set[str] = set()  # of those, whose holders are saying what they have
        self._with_holders: set[str] = set()

    def has_state_of(self, job: Job) -> bool:
        """Whether holders have newer state of the job, which waits, than its snapshot is."""
        saved = self._state.store.snapshot(job.id)
        return bool(job.spec.memory_copy_every_steps) and job.steps_done > (saved[1] if saved else 0)

    def lineage(self, job: Job) -> Lineage:
        """Copies of generations before the one in which the job was last started are of a past that it has left, but
        those that it was started from. One without ranks, which is to start again, has been promised how far it is."""
        if not job.spec.memory_copy_every_steps:
            return Lineage()
        found = self._state.store.events(job_id=job.id, limit=1, which=_LAUNCHED)
        since, source = 0, None
        if found:
            since, source = int(found[0].data["generation"]), found[0].data.get("copies")  # older records have none
        runs = job.state in HOLDS_DEVICES and job.state is not JobState.STARTING
        return Lineage(since, key_of(source) if source is not None else None, None if runs else job.steps_done)

    def wait_for(self, job: Job, until_s: float) -> None:
        """Do not let the job start before its copies were looked for."""
        self._waiting[job.id] = until_s
        self._state.watch(job.id).busy_until_s = until_s + _MARGIN_S

    def keeps(self, process: str) -> bool:
        name = ProcessName.parse(process)
        return name.held_on is not None and self._run_of(name.job_id) is not None

    def go_on(self) -> None:
        """Look at what nodes have brought."""
        for job_id, until_s in list(self._waiting.items()):
            self._look(self._state.store.job(job_id), in_time=self._state.clock() <= until_s)
        for node, processes in self._roster.found.items():
            for process in [process for process in processes if _HOLDER in process]:  # few of many
                job_id = ProcessName.parse(process).job_id
                if job_id not in self._besides and job_id not in self._waiting:
                    del processes[process]
                    self._join(node, process)

    def _look(self, job: Job, in_time: bool) -> None:
        run = self._run_of(job.id)
        if run is None or job.state in HOLDS_DEVICES:  # it was cancelled meanwhile
            del self._waiting[job.id]
            return
        if job.id in self._asked:
            return
        names, last = self._roster.processes_of(job.id), self._roster.is_complete or not in_time
        if not (names or last or job.id in self._with_holders):
            return
        # What may fail comes first: holders that were handed over would not be found again.
        lineage, saved = self.lineage(job), self._state.store.snapshot(job.id)
        found = {process: node for process in self._roster.hand_over(names) if (node := _node_of(process))}
        if found:
            self._with_holders.add(job.id)
        self._asked.add(job.id)
        asked = take_back_copies(run, lineage, saved, found, self._hub.claim, last, in_time)
        asked.add_done_callback(lambda done: self._controller.post(lambda: self._found(job.id, found, done)))

    def _found(self, job_id: str, holders: dict[str, str], asked: Future[Answer]) -> None:
        """Start from the copies if they are whole; without any, if no more can come, from the snapshot."""
        self._end_if_cancelled(holders, asked)
        self._asked.discard(job_id)
        if job_id not in self._waiting:
            return
        told = not asked.cancelled() and asked.exception() is None
        name, final = asked.result() if told else Answer(None, final=True)
        if name is None and not final:  # others may come, and who is slow may answer after all
            again = threading.Timer(_AGAIN_S, lambda: self._controller.post(self.go_on))
            again.daemon = True
            again.start()
            return
        del self._waiting[job_id]
        job, watch, saved = self._state.store.job(job_id), self._state.watch(job_id), self._state.store.snapshot(job_id)
        watch.busy_until_s = 0.0
        self._state.changed = True
        if name is not None:
            watch.snapshot = name
            self._state.log("taken-back", job_id, processes=len(holders), generation=job.generation, copies=name)
        else:
            step = saved[1] if saved else 0
            self._state.store.progress(job_id, job.generation, step)
            self._state.log("copies-gone", job_id, step=job.steps_done, snapshot_step=step)

    def _join(self, node: str, process: str) -> None:
        """A holder of a job that goes on already, or of none."""
        run = self._run_of(ProcessName.parse(process).job_id)
        if run is None:
            self._roster.clean_up(node, process)
            return
        joined = join_copies(run, {process: node}, self._hub.claim)
        joined.add_done_callback(
            lambda done: self._controller.post(lambda: self._end_if_cancelled({process: node}, done))
        )

    def _end_if_cancelled(self, holders: dict[str, str], asked: Future[None] | Future[Answer]) -> None:
        """The job has ended before they could become its own."""
        if asked.cancelled():
            for process, node in holders.items():
                self._roster.clean_up(node, process)

    def _run_of(self, job_id: str) -> JobRun | None:
        """Of a job that keeps copies and has not ended."""
        watch = self._state.watches.get(job_id)
        run = watch.run if watch is not None else None
        return run if isinstance(run, JobRun) and run.spec.memory_copy_every_steps else None


def _node_of(process: str) -> str:
    return ProcessName.parse(process).held_on or ""
