"""After a controller's restart: running jobs are taken back as they are, or declared lost; none runs twice.

The store says which jobs hold devices and in which generation; the nodes say which processes they have. A job is taken
back once all its nodes are here. Until then, for one lease, it is left alone: its devices are held, no decision
concerns it. A job whose nodes do not come in time, or come without a rank of it, is lost as if the rank had died. A job
that waits to start again from copies in memory gets back the holders that have them (`copy_adoption.py`).
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from suika.control.agents import AgentHub
from suika.control.controller import Controller
from suika.control.copy_adoption import CopyAdoption
from suika.control.launch import LocalLauncher
from suika.control.roster import Roster
from suika.control.store import StoreAwayError
from suika.core.cluster import Device
from suika.core.job import HOLDS_DEVICES, Job, JobState
from suika.runtime.adopt import OnRecord, ProcessName, take_back
from suika.runtime.command_run import CommandRun
from suika.runtime.coordinator import JobRun
from suika.runtime.events import JobEvent, Outcome, Snapshotted
from suika.runtime.messages import Processes

_GRACE_S = 5.0  # beyond the lease: agents wait between attempts


class AgentLauncher(LocalLauncher):
    """Runs jobs on agents. Data and snapshots lie in `folder`, which all nodes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.controller: Controller | None = None  # both known after this is made
        self.processes: Processes | None = None

    def run(self, job: Job, data: Path, on_event: Callable[[JobEvent], None]) -> JobRun | CommandRun:
        """Remembers which data it was: those who join after a restart of the controller must read the same."""
        assert self.controller is not None
        store = self.controller.state.store

        def hear(event: JobEvent) -> None:
            """On the job's thread: a snapshot is on record before the ranks that wrote it may be let go."""
            if isinstance(event, Snapshotted):
                with suppress(StoreAwayError):  # the loop will try again
                    store.saved(event.job_id, event.generation, event.step, event.path)
            on_event(event)

        assert self.processes is not None
        if job.spec.rigid:
            return CommandRun(job.id, job.spec, self.processes, self.controller.state.cluster, on_event)
        folder = self.folder / "jobs" / job.id
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / "run.json.tmp"
        draft.write_text(json.dumps({"data": str(data)}))
        draft.rename(folder / "run.json")
        return JobRun(job.id, job.spec, self.processes, self.controller.state.cluster, folder, str(data), hear)

    def run_again(self, job: Job, on_event: Callable[[JobEvent], None]) -> JobRun | CommandRun:
        """As the job ran before. If it had not come that far, its data are prepared now."""
        remembered = self.folder / "jobs" / job.id / "run.json"
        data = Path(json.loads(remembered.read_text())["data"]) if remembered.exists() else self.prepare(job)
        return self.run(job, data, on_event)


class Adoption:
    """`begin` before the controller's loop starts; the rest happens on it."""

    def __init__(
        self, controller: Controller, roster: Roster, hub: AgentHub, launcher: AgentLauncher, clock_speed: float = 1.0
    ) -> None:
        """`clock_speed`: seconds of the controller's clock per real second; a lease is real seconds."""
        self.controller, self.state = controller, controller.state
        self._wait_s = (hub.lease_s + _GRACE_S) * clock_speed
        self._roster, self._hub, self._launcher = roster, hub, launcher
        self._awaited: dict[str, float] = {}  # job -> until when
        self._copies = CopyAdoption(controller, roster, hub, besides=self._awaited)
        roster.keep = self._keeps
        roster.on_change = self.go_on

    def begin(self) -> None:
        """What the store knows of live jobs becomes what the controller watches."""
        state, until_s = self.state, self.state.clock() + self._wait_s
        users = Counter(device for job in state.active() if job.state in HOLDS_DEVICES for device in _devices(job))
        for job in state.active():
            watch = state.watch(job.id)
            saved = state.store.snapshot(job.id)
            watch.snapshot = saved[0] if saved else None
            watch.hold_until_s = job.not_before_s or 0.0
            if job.state in HOLDS_DEVICES:
                assert job.plan is not None
                held = _devices(job)
                if saved and saved[1] >= job.spec.steps and any(users[device] > 1 for device in held):
                    held = ()  # its final checkpoint was on its way, and others had its devices already
                state.hold(job.id, held)
                watch.busy_until_s = until_s
                void = job.state is JobState.REDEPLOYING and job.generation != job.last_generation
                watch.void_move = job.last_generation if void else None
                goes_on = job.plan if void else job.target or job.plan
                shown = () if job.state is JobState.PREEMPTING else goes_on.devices
                state.give_up(set(held) - set(shown), until_s)
                watch.run = self._launcher.run_again(job, self.controller.post)
                self._awaited[job.id] = until_s
            elif self._copies.has_state_of(job):
                watch.run = self._launcher.run_again(job, self.controller.post)
                self._copies.wait_for(job, until_s)
        later = threading.Timer(self._hub.lease_s + _GRACE_S + 1.0, lambda: self.controller.post(self.go_on))
        later.daemon = True
        later.start()

    def _keeps(self, process: str) -> bool:
        return ProcessName.parse(process).job_id in self._awaited or self._copies.keeps(process)

    def go_on(self) -> None:
        """Take back every job whose nodes are here; give up waiting for those whose time is over."""
        for job_id, until_s in list(self._awaited.items()):
            job = self.state.store.job(job_id)
            if self._is_ready(job) or job.state not in HOLDS_DEVICES or self.state.clock() > until_s:
                self._take_back(job)
        self._copies.go_on()

    def _is_ready(self, job: Job) -> bool:
        """Its nodes are here; and the whole cluster is, if it may have to start from copies that lie anywhere."""
        if self._roster.devices_away(_devices(job)):
            return False
        if not job.spec.memory_copy_every_steps or self._roster.is_complete:
            return True
        assert job.plan is not None
        ranks = {ProcessName.parse(process).device for process in self._roster.processes_of(job.id)}
        return job.state is not JobState.STARTING and set(job.plan.devices) <= ranks

    @property
    def waits(self) -> bool:
        return bool(self._awaited)

    def _take_back(self, job: Job) -> None:
        """What may fail comes first: then it is tried again, with nobody taken back by half."""
        record, names = self._on_record(job), self._roster.processes_of(job.id)
        self.state.log("taken-back", job.id, processes=len(names), generation=job.generation)
        del self._awaited[job.id]
        mine = self._roster.hand_over(names)
        watch = self.state.watch(job.id)
        watch.busy_until_s, run = 0.0, watch.run
        assert run is not None
        if isinstance(run, CommandRun):
            run.take_back(record, mine, self._hub.claim)
        else:
            take_back(run, record, mine, self._hub.claim)
        if job.state is JobState.PREEMPTING:
            run.preempt()
        elif job.state not in HOLDS_DEVICES:
            run.kill()

    def _on_record(self, job: Job) -> OnRecord:
        assert job.plan is not None
        move, committed = None, False
        if job.state is JobState.REDEPLOYING:
            assert job.target is not None
            move, committed = (job.target, job.last_generation), job.generation == job.last_generation
        snapshot = self.state.store.snapshot(job.id)
        leaving = None
        if snapshot is not None and snapshot[1] >= job.spec.steps:
            leaving = Outcome.FINISHED
        elif snapshot is not None and job.state is JobState.PREEMPTING:
            leaving = Outcome.PREEMPTED
        return OnRecord(
            job.plan,
            job.generation,
            job.steps_done,
            job.reason,
            snapshot,
            self._copies.lineage(job),
            move,
            committed,
            leaving,
            started=job.state is not JobState.STARTING,
        )


def _devices(job: Job) -> tuple[Device, ...]:
    """Of the running generation and of a move in flight."""
    plans = [plan for plan in (job.plan, job.target) if plan is not None]
    return tuple(dict.fromkeys(device for plan in plans for device in plan.devices))
