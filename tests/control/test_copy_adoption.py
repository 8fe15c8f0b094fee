"""A restarted controller and the holders that it finds: those with a waiting job's state are its own, others are ended.

The controller, its hub and the job's coordinator are real; the agents' end of the hub is played here, holders included.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_agents import Node as AgentEnd
from world import World

from suika.control.adopt import Adoption
from suika.control.agents import AgentHub
from suika.control.api import Api
from suika.control.controller import Controller
from suika.control.roster import Roster
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.runtime.coordinator import JobRun
from suika.runtime.copysets import Lineage
from suika.runtime.events import Ended, Outcome, Started

STEP = 7
ADDRESS = {"host": "127.0.0.1", "port": 9, "line": "l", "token": "t"}


class Agent(AgentEnd):
    """Its holders report what they `have`, and end when they are told to."""

    def __init__(self, hub: AgentHub, name: str, have: dict[str, list[dict[str, Any]]], **processes: int) -> None:
        super().__init__(hub, name)
        self.have, self.processes = have, dict.fromkeys(have, 7) | processes
        self._todo: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._obey, daemon=True).start()

    def come(self) -> None:
        self.connect()
        self.greet(**self.processes)

    def _hear(self, frame: dict[str, Any]) -> None:
        known = len(self.orders)
        super()._hear(frame)
        for order in self.orders[known:]:
            self._todo.put(order)

    def _obey(self) -> None:
        while True:
            order = self._todo.get()
            process = order.get("process")
            if order["do"] == "kill" and self.processes.pop(process, None) is not None:
                self.say("exit", process=process, code=-9)
            elif order["do"] == "send" and order["message"]["do"] == "report" and process in self.processes:
                self._report(process, order["message"]["request"])

    def _report(self, process: str, request: int) -> None:
        for held in self.have[process]:
            self.say("message", process=process, message={"say": "held", **held})
        holding = {"say": "holding", "generation": 0, "num_bytes": 10, **ADDRESS, "request": request}
        self.say("message", process=process, message=holding)


class Restarted:
    """A world whose job has lost its ranks; then another controller with the same store."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self._folder, self.runs = world, folder, []
        self.controller = Controller(
            world.cluster, world.store, world.policy, world.controller.pricing, world, lambda: world.now
        )
        pricing: Any = SimpleNamespace(grow=lambda cluster: None)
        self.roster = Roster(self.controller, pricing, world.store)  # type: ignore[arg-type]
        self.hub = self.roster.hub = AgentHub(self.roster)
        launcher: Any = SimpleNamespace(run_again=self._run)
        self.adoption = Adoption(self.controller, self.roster, self.hub, launcher)
        self.adoption.begin()

    def _run(self, job: Any, hear: Any) -> JobRun:
        run = JobRun(job.id, job.spec, self.hub, self.world.cluster, self._folder, str(self.world.data), hear)
        self.runs.append(run)
        return run

    @property
    def watch(self) -> Any:
        return self.controller.state.watch(self.world.job("train").id)

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline, (what, self.world.kinds("train"))
            self.controller.turn(0.02)

    def data(self, kind: str) -> dict[str, Any]:
        return next(dict(e.data) for e in reversed(self.world.store.events()) if e.kind == kind)

    def close(self) -> None:
        for run in self.runs:
            run.close()
        self.hub.close()


@pytest.fixture
def lost(world: World, tmp_path: Path) -> Iterator[Callable[[], Restarted]]:
    """Restarts the controller of a job that was lost in generation 1, its newest state in memory alone."""
    made: list[Restarted] = []

    def restart() -> Restarted:
        made.append(Restarted(world, tmp_path))
        return made[-1]

    _lose(world, 1)
    yield restart
    for each in made:
        each.close()


def _lose(world: World, generation: int) -> None:
    if generation == 1:
        run = world.start("train", "n0/0", "n0/1", memory_copy_every_steps=5)
    else:
        run = world.runs["train"]
    run.step = STEP + 2
    name = f"memory:{generation}/{STEP}"
    run.on_event(Ended(run.job_id, run.generation, Outcome.LOST, run.step, name, STEP, "killed"))
    world.turn()
    assert world.job("train").steps_done == STEP
    assert world.job("train").state is JobState.QUEUED


def holder(world: World, node: str) -> str:
    return f"{world.job('train').id}.holder.{node}.ab12"


def shares(world: World, generation: int = 1, step: int = STEP, copied: bool = False) -> list[dict[str, Any]]:
    """What a holder that has all of a set says: both ranks', as their own or as copies."""
    spec = world.job("train").spec
    devices = world.cluster.devices[:2]
    shape = (spec.model, spec.global_batch, spec.sequence_length)
    meta = {"plan": Plan.checked(Layout(dp=2), devices, *shape, world.cluster).to_dict(), "records": {}}
    about = {"generation": generation, "step": step, "copied": copied, "alone": 3, "num_bytes": 5, "stall_s": 0.1}
    return [about | {"rank": rank, "meta": {} if rank else meta} for rank in (0, 1)]


def test_a_waiting_job_gets_its_copies_back_at_once(world: World, lost: Callable[[], Restarted]) -> None:
    """From one node, before the other is there; until then it may not start from less."""
    again = lost()
    assert again.watch.busy_until_s > world.now
    Agent(again.hub, "n0", {holder(world, "n0"): shares(world)}).come()
    again.until(lambda: again.watch.busy_until_s == 0, "the copies")
    assert again.watch.snapshot == f"memory:1/{STEP}"
    assert again.data("taken-back")["copies"] == f"memory:1/{STEP}"
    late = Agent(again.hub, "n1", {holder(world, "n1"): shares(world, copied=True)})
    late.come()
    again.until(lambda: len(again.runs[0].copies.holders.alive) == 2, "the other node's holder")
    assert late.processes, "it is needed, too"


def test_copies_outside_of_the_jobs_node_are_enough(world: World, lost: Callable[[], Restarted]) -> None:
    """The node that it ran on does not come back."""
    again = lost()
    Agent(again.hub, "n1", {holder(world, "n1"): shares(world, copied=True)}).come()
    again.until(lambda: again.watch.busy_until_s == 0, "the copies")
    assert again.watch.snapshot == f"memory:1/{STEP}"


def test_what_one_node_lacks_another_may_have(world: World, lost: Callable[[], Restarted]) -> None:
    again = lost()
    first, second = shares(world)
    Agent(again.hub, "n0", {holder(world, "n0"): [first]}).come()
    again.until(lambda: not again.adoption._copies._asked and again.runs[0].copies.holders.alive, "the first")
    assert again.watch.busy_until_s > world.now, "half of it: others may come"
    Agent(again.hub, "n1", {holder(world, "n1"): [second]}).come()
    again.until(lambda: again.watch.busy_until_s == 0, "the copies")
    assert again.watch.snapshot == f"memory:1/{STEP}"


@pytest.mark.parametrize("have", ["nothing", "half", "an older step", "no holder"])
def test_without_its_state_it_goes_back_to_the_snapshot(world: World, lost: Callable[[], Restarted], have: str) -> None:
    again = lost()
    said = {"nothing": [], "half": shares(world)[:1], "an older step": shares(world, step=STEP - 5)}
    agent = Agent(again.hub, "n0", {holder(world, "n0"): said[have]} if have in said else {})
    agent.come()
    Agent(again.hub, "n1", {}).come()
    again.until(lambda: again.watch.busy_until_s == 0, "nobody waits for what cannot come")
    assert again.data("copies-gone") == {"step": STEP, "snapshot_step": 0}
    assert (again.watch.snapshot, world.job("train").steps_done) == (None, 0)
    again.until(lambda: not agent.processes, "the holder is ended")


def test_a_holder_that_is_slow_to_answer_is_waited_for(
    world: World, lost: Callable[[], Restarted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all nodes are here: the copies are there, and their node has little time."""
    monkeypatch.setattr("suika.runtime.holders.ANSWER_S", 0.0)
    again = lost()
    agent = Agent(again.hub, "n0", {holder(world, "n0"): shares(world)})
    say, slow = agent.say, []

    def put(word: tuple[str, dict[str, Any]]) -> None:
        say(word[0], **word[1])

    agent.say = lambda event, **data: (slow.append if "message" in data else put)((event, data))  # type: ignore
    agent.come()
    Agent(again.hub, "n1", {}).come()
    again.until(lambda: again.adoption._copies._asked, "it to be asked")
    again.until(lambda: slow and not again.adoption._copies._asked, "the end of patience")
    assert again.watch.busy_until_s > world.now
    for word in slow:
        put(word)
    again.until(lambda: again.watch.busy_until_s == 0, "its answer")
    assert again.watch.snapshot == f"memory:1/{STEP}"


class Replaying(Agent):
    """After its hello it says again what its holders said last to another coordinator: of what they hold one share,
    and the answer to its request, if they number them. To new questions they answer after a moment."""

    request: int | None = None

    def come(self) -> None:
        super().come()
        for process, have in self.have.items():
            self.say("message", process=process, message={"say": "held", **have[-1]})
            self.say("message", process=process, message=self._holding(self.request))

    def _holding(self, request: int | None) -> dict[str, Any]:
        holding = {"say": "holding", "generation": 0, "num_bytes": 10, **ADDRESS}
        return holding if self.request is None else holding | {"request": request}

    def _report(self, process: str, request: int) -> None:
        time.sleep(0.2)
        for held in self.have[process]:
            self.say("message", process=process, message={"say": "held", **held})
        self.say("message", process=process, message=self._holding(request))


@pytest.mark.parametrize("request_before", [None, 0, 2, 1 << 60])
def test_an_answer_to_another_coordinator_is_none(
    world: World, lost: Callable[[], Restarted], request_before: int | None
) -> None:
    """All nodes are here, and their newest words sound as if half of the set were gone."""
    again = lost()
    Agent(again.hub, "n1", {}).come()
    agent = Replaying(again.hub, "n0", {holder(world, "n0"): shares(world)})
    agent.request = request_before
    agent.come()
    again.until(lambda: again.watch.busy_until_s == 0, "the copies")
    assert again.watch.snapshot == f"memory:1/{STEP}"
    assert world.job("train").steps_done == STEP


def test_when_the_lease_is_over_nobody_waits_longer(world: World, lost: Callable[[], Restarted]) -> None:
    again = lost()
    Agent(again.hub, "n0", {}).come()
    again.controller.turn(0.1)
    assert again.watch.busy_until_s > world.now
    world.now += again.hub.lease_s + 6
    again.controller.post(again.adoption.go_on)
    again.until(lambda: again.watch.busy_until_s == 0, "the end of the wait")
    assert again.data("copies-gone")["snapshot_step"] == 0


def test_what_the_job_did_in_a_past_that_it_left_is_not_its_state(world: World, lost: Callable[[], Restarted]) -> None:
    """It was started again since: a holder that comes back has the same step, of another history."""
    world.decide(world.grant("train", "n0/0", "n0/1"))
    world.runs["train"].started()
    world.turn()
    _lose(world, 2)
    again = lost()
    agents = [Agent(again.hub, "n0", {holder(world, "n0"): shares(world)}), Agent(again.hub, "n1", {})]
    for agent in agents:
        agent.come()
    again.until(lambda: again.watch.busy_until_s == 0, "an answer")
    assert again.watch.snapshot is None


def _start_from(world: World, copies: str | None) -> None:
    """The job that was lost in generation 1 runs again, in generation 2, from the step of its copies."""
    world.decide(world.grant("train", "n0/0", "n0/1"))
    run = world.runs["train"]
    run.step = STEP
    run.on_event(Started(run.job_id, run.generation, STEP, 0.1, run.plan.devices, copies=copies))
    world.turn()
    assert world.job("train").state is JobState.RUNNING


def test_what_the_job_was_started_from_is_its_state_until_it_has_newer(
    world: World, lost: Callable[[], Restarted]
) -> None:
    """It was lost again before it had made another copy."""
    _start_from(world, f"memory:1/{STEP}")
    run = world.runs["train"]
    run.on_event(Ended(run.job_id, run.generation, Outcome.LOST, STEP + 2, f"memory:1/{STEP}", STEP, "killed"))
    world.turn()
    again = lost()
    Agent(again.hub, "n1", {holder(world, "n1"): shares(world, copied=True)}).come()
    again.until(lambda: again.watch.busy_until_s == 0, "the copies")
    assert again.watch.snapshot == f"memory:1/{STEP}"
    assert world.job("train").steps_done == STEP


@pytest.mark.parametrize("copies", [f"memory:1/{STEP}", None])
def test_a_running_job_is_taken_back_with_what_it_was_started_from(
    world: World, lost: Callable[[], Restarted], copies: str | None
) -> None:
    """Where that is not on record, as with a start from disk, it is of another past."""
    _start_from(world, copies)
    again = lost()
    Agent(again.hub, "n1", {holder(world, "n1"): shares(world, copied=True)}).come()
    ranks = {f"{world.job('train').id}.2.n0/{index}": 7 for index in (0, 1)}
    Agent(again.hub, "n0", {holder(world, "n0"): shares(world)}, **ranks).come()
    holders = again.runs[0].copies.holders.alive
    again.until(lambda: len([each for each in holders.values() if each.address is not None]) == 2, "what both hold")
    assert again.runs[0].copies.newest == ((1, STEP) if copies else None)


def test_a_start_that_an_older_controller_put_on_record_is_read(world: World, lost: Callable[[], Restarted]) -> None:
    """It did not write down from which copies that was."""
    again = lost()
    job = world.job("train")
    world.store.append(world.now, "launched", job.id, generation=4, plan={}, launch_s=1.0, resumed_step=STEP)
    assert again.adoption._copies.lineage(job) == Lineage(since=4, step=STEP)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_job_that_is_cancelled_leaves_no_holder(world: World, lost: Callable[[], Restarted], when: str) -> None:
    again = lost()
    agent = Agent(again.hub, "n0", {holder(world, "n0"): shares(world)})
    if when == "after":
        agent.come()
        again.until(lambda: again.watch.snapshot is not None, "the copies")
    Api(again.controller).cancel("train")
    if when == "before":
        agent.come()
    again.until(lambda: not agent.processes, "the holder is ended")
    again.until(lambda: not again.roster._strangers.get("n0"), "the node to be clean")


def test_holders_of_nobody_are_ended(world: World, lost: Callable[[], Restarted]) -> None:
    again = lost()
    agent = Agent(again.hub, "n0", {"jffffffffff.holder.n0.ab": shares(world), holder(world, "n0"): shares(world)})
    agent.come()
    again.until(lambda: len(agent.processes) == 1, "the stranger is ended")
    assert set(agent.processes) == {holder(world, "n0")}


def test_a_running_job_gets_the_holder_of_a_node_that_comes_late(world: World, tmp_path: Path) -> None:
    """It has no rank there: it is taken back without waiting for it."""
    run = world.start("train", "n0/0", "n0/1", memory_copy_every_steps=5)
    run.steps(3)
    world.turn()
    again = Restarted(world, tmp_path)
    job_id = world.job("train").id
    ranks = {f"{job_id}.1.n0/{index}": 7 for index in (0, 1)}
    Agent(again.hub, "n0", {holder(world, "n0"): shares(world)}, **ranks).come()
    again.until(lambda: not again.adoption.waits, "its ranks")
    late = Agent(again.hub, "n1", {holder(world, "n1"): shares(world, copied=True)})
    late.come()
    again.until(lambda: again.runs[0].copies.newest == (1, STEP), "the set to count")
    assert late.processes
    again.close()
