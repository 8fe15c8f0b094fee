"""A controller without processes: scripted runs, a clock that tests turn, and a policy that tests write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from suika.control.api import Api
from suika.control.controller import Controller
from suika.control.joblogs import FolderShelf
from suika.control.memory_store import MemoryStore
from suika.control.store import Store
from suika.core.cluster import Cluster, Device, parse_cluster_shorthand
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.job import Job, JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.redeployment import Phase, Redeployment
from suika.core.sample import StepSample
from suika.core.snapshot import JobView, Move, Option, ScalingCurve, Snapshot
from suika.estimate.knowledge import Known
from suika.runtime.events import Ended, JobEvent, Moving, Outcome, Released, Snapshotted, Started, StepDone

MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}


class FixedPricing:
    """dp alone, perfect scaling, every move half a second."""

    def curve(self, spec: JobSpec, known: tuple[Known, ...] = ()) -> ScalingCurve:
        low, high = spec.devices.min, spec.devices.max
        if isinstance(spec.layout, Layout):
            return ScalingCurve((Option((spec.layout.num_ranks,), spec.layout.resolve(spec.model), 1.0, "cpu"),))
        sizes = range(low, min(high, 4) + 1)
        return ScalingCurve(tuple(Option((n,), Layout(dp=n).resolve(spec.model), 1.0 / n, "cpu") for n in sizes))

    def step_s(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> float:
        return 1.0 / plan.layout.num_ranks

    def others(self, spec: JobSpec, plan: Plan, known: tuple[Known, ...] = ()) -> list[dict[str, Any]]:
        return []

    def device_type(self, plan: Plan) -> str:
        return "cpu"

    def learnt(self, spec: JobSpec, plan: Plan, known: Known, samples: Iterable[StepSample]) -> Known:
        return known

    def move_cost(self, specs: Mapping[str, JobSpec]) -> HalfASecond:
        return HalfASecond()


class HalfASecond:
    def __call__(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> Move:
        return Move(0.5, 0.5)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return 0.5


class FakeRun:
    """Looks like a `JobRun`; does nothing until the test says what happens. `asked` holds the commands."""

    def __init__(self, job: Job, on_event: Callable[[JobEvent], None]) -> None:
        self.job_id, self.on_event = job.id, on_event
        self.asked: list[tuple[Any, ...]] = []
        self.generation, self.plan, self.step = 0, None, 0
        self.closed = False
        self.move: tuple[Plan, int, Reason, Callable[[], bool], Future] | None = None

    # -- commands
    def start(self, plan: Plan, generation: int, snapshot: str | None = None) -> Future:
        self.asked.append(("start", plan, generation, snapshot))
        self.plan, self.generation = plan, generation
        return Future()

    def redeploy(self, plan: Plan, generation: int, reason: Reason, commit: Callable[[], bool]) -> Future:
        self.asked.append(("redeploy", plan, generation))
        self.move = (plan, generation, reason, commit, Future())
        return self.move[-1]

    def preempt(self, deadline_s: float | None = None) -> Future:
        self.asked.append(("preempt",) if deadline_s is None else ("preempt", deadline_s))
        return Future()

    def kill(self) -> None:
        self.asked.append(("kill",))

    def close(self) -> None:
        self.closed = True

    # -- what happens to it
    def up(self) -> None:
        self.on_event(Started(self.job_id, self.generation, 0, 0.1, self.plan.devices))

    def started(self, step: int = 1) -> None:
        self.step = step
        self.on_event(Started(self.job_id, self.generation, step - 1, 0.1, self.plan.devices))
        self.on_event(StepDone(self.job_id, self.generation, step, 2.0, 1.0, 1e-3, 64, 0.0))

    def steps(self, num: int, step_s: float = 0.1) -> None:
        for _ in range(num):
            self.step += 1
            event = StepDone(self.job_id, self.generation, self.step, 1.0, 1.0, 1e-3, 64, self.step * step_s)
            self.on_event(event)

    def moved(self, release: bool = True) -> bool:
        """The move comes to its commit; True if it was allowed to."""
        plan, generation, reason, commit, _ = self.move
        old = self.plan
        record = Redeployment(self.job_id, generation, old, plan, reason, Phase.COMMIT, cut_step=self.step)
        if not commit():
            self.aborted("the commit was refused")
            return False
        self.plan, self.generation = plan, generation
        self.on_event(Moving(self.job_id, generation, record))
        if release:
            self.released(set(old.devices) - set(plan.devices))
        return True

    def released(self, devices: set[Device]) -> None:
        self.on_event(Released(self.job_id, self.generation, tuple(sorted(devices))))

    def aborted(self, error: str) -> None:
        """The joiners are gone first; the old ranks have resumed a little later."""
        plan, generation, reason, _, _ = self.move
        if joined := set(plan.devices) - set(self.plan.devices):
            self.released(joined)
        record = Redeployment(self.job_id, generation, self.plan, plan, reason, Phase.ABORTED, error=error)
        self.on_event(Moving(self.job_id, self.generation, record))

    def saved(self, step: int) -> None:
        self.on_event(Snapshotted(self.job_id, self.generation, step, f"/snapshots/{step}", 0.01))

    def ended(self, outcome: Outcome, saved: int = 0, dead: tuple[Device, ...] = (), **more: Any) -> None:
        path = f"/snapshots/{saved}" if saved else None
        self.on_event(Ended(self.job_id, self.generation, outcome, self.step, path, saved, "why", dead, 0.2, **more))


class ScriptedPolicy:
    """Answers with what the test put into `next`, once."""

    name = "scripted"
    round_s = 0.0

    def __init__(self) -> None:
        self.next: list[Decision] = []
        self.seen: list[Snapshot] = []

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        self.seen.append(snapshot)
        answer, self.next = self.next, []
        return answer


class Told:
    """What another thread does; `told` once whoever waits for it has been told, a moment after it is done."""

    def __init__(self, future: Future[Any]) -> None:
        self._future, self.told = future, threading.Event()

    def add_done_callback(self, tell: Callable[[Future[Any]], None]) -> None:
        self._future.add_done_callback(lambda done: (tell(done), self.told.set()))


class World:
    """One controller on 2 nodes x 4 devices, and everything around it under the test's control."""

    def __init__(self, folder: Path, policy: Any = None, store: Store | None = None) -> None:
        self.now = 100.0
        self.runs: dict[str, FakeRun] = {}
        self.cluster: Cluster = parse_cluster_shorthand("2x4:cpu")
        self.policy = policy or ScriptedPolicy()
        self.data = folder / "text"
        self.data.write_text("some text to train on\n" * 50)
        self.store = store or MemoryStore()
        self.controller = Controller(
            self.cluster, self.store, self.policy, FixedPricing(), self, lambda: self.now, device_hold_s=10.0
        )
        self.elsewhere: list[Told] = []  # what other threads do
        background = self.controller.actor.background
        self.controller.actor.background = lambda *call: self._followed(background(*call))
        self.logs = folder / "logs"
        self.logs.mkdir()
        self.api = Api(self.controller, FolderShelf(self.logs))

    def _followed(self, future: Future[Any]) -> Told:
        self.elsewhere.append(Told(future))
        return self.elsewhere[-1]

    # -- a Launcher
    def prepare(self, job: Job) -> Path:
        return self.data

    def run(self, job: Job, data: Path, on_event: Callable[[JobEvent], None]) -> FakeRun:
        run = self.runs[job.spec.name] = FakeRun(job, on_event)
        return run

    # -- what tests say
    def file(self, name: str, **changes: Any) -> dict[str, Any]:
        base = {"name": name, "model": MODEL, "data": str(self.data), "global_batch": 8, "sequence_length": 16}
        return base | {"steps": 100, "devices": {"min": 1, "max": 8}} | changes

    def submit(self, name: str, **changes: Any) -> str:
        return self.api.submit(self.file(name, **changes))["id"]

    def job(self, name: str) -> Job:
        return next(job for job in reversed(self.store.jobs()) if job.spec.name == name)

    def turn(self, seconds: float = 0.0) -> None:
        """Let `seconds` pass, then do rounds until nothing arrives any more (data is prepared in another thread)."""
        self.now += seconds
        for _ in range(4):
            self.controller._decide_at_s = 0.0  # the clock stands: a rest after a long cycle would never end
            elsewhere = not all(each.told.is_set() for each in self.elsewhere)
            self.controller.turn(5.0 if elsewhere else 0.02)  # as soon as something arrives; a busy machine takes long
        faults = [event.data for event in self.store.events() if event.kind == "controller-fault"]
        assert not faults, faults

    def command(self, name: str, num: int, **changes: Any) -> dict[str, Any]:
        """The file of a rigid job."""
        return {"name": name, "command": ["train"], "devices": {"min": num, "max": num}} | changes

    def start_command(self, name: str, *devices: str, **changes: Any) -> FakeRun:
        """Submit a command and have it run on `devices`."""
        self.api.submit(self.command(name, len(devices), **changes))
        self.decide(self.grant(name, *devices))
        self.runs[name].up()
        self.turn()
        return self.runs[name]

    def decide(self, *decisions: Decision) -> None:
        self.policy.next = list(decisions)
        self.controller.state.changed = True
        self.turn()

    def start(self, name: str, *devices: str, **changes: Any) -> FakeRun:
        """Submit a job and have it run on `devices`."""
        self.submit(name, **changes)
        self.decide(self.grant(name, *devices))
        self.runs[name].started()
        self.turn()
        return self.runs[name]

    def grant(self, name: str, *devices: str, layout: Layout | None = None) -> Decision:
        job = self.job(name)
        action = Action.REDEPLOY if job.plan is not None else Action.START
        reason = Reason(ReasonCode.START if action is Action.START else ReasonCode.MIGRATE, "the test wants it")
        named = tuple(Device.parse(device) for device in devices)
        return Decision(job.id, action, reason, layout or Layout(dp=len(named)), named)

    def preempt(self, name: str) -> Decision:
        return Decision(self.job(name).id, Action.PREEMPT, Reason(ReasonCode.USER, "the test wants it"))

    def kinds(self, name: str | None = None) -> list[str]:
        job_id = self.job(name).id if name else None
        return [event.kind for event in self.store.events(job_id=job_id)]
