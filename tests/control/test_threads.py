"""Who asks and what happens are on different threads: nobody's look falls into the midst of a change.

Threads give way every microsecond here, where a service's do every millisecond: what could go wrong once in a day does
so in a moment.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_agents import Job, Node, Notes
from world import World

from suika.agent.condition import Condition
from suika.agent.outbox import Outbox
from suika.control import agents, pricing
from suika.control.agents import AgentHub, UnreachableError
from suika.control.metrics import Metrics
from suika.control.roster import GrowingPricing
from suika.control.state import Waiting, Watch
from suika.core.cluster import parse_cluster_shorthand
from suika.core.job import parse_job
from suika.core.sample import StepSample
from suika.runtime.events import Sampled, StepDone

AT_ONCE_S = 0.5


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*actions: Callable[[], object]) -> None:
    """Each again and again on a thread of its own, for a moment. Raises what one of them raised."""
    end_s, failed = time.monotonic() + AT_ONCE_S, []

    def repeat(action: Callable[[], object]) -> None:
        try:
            while time.monotonic() < end_s and not failed:
                action()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_step_times_are_counted_while_others_come() -> None:
    watch = Watch()

    def train() -> None:
        for step in range(30):
            watch.steps_seen.append((step, step * 0.1))
        watch.steps_seen.clear()

    at_once(train, lambda: watch.step_s, lambda: watch.step_s)


def test_who_looks_at_a_job_begins_nothing(world: World) -> None:
    """The loop goes through its watches meanwhile."""
    job_id = world.submit("a")
    for look in (world.api.jobs, world.api.nodes, Metrics(world.api).text, lambda: world.api.describe(job_id)):
        look()
    assert world.controller.state.watches == {}


def test_what_a_job_waits_for_may_change_while_it_is_told(world: World) -> None:
    world.submit("a")
    others = {world.submit(name) for name in ("b", "c", "d")}
    waiting = Waiting(world.grant("a", "n0/0"), None, set(others), 0.0)
    world.controller.state.waiting.append(waiting)

    def show(job: Any) -> str:
        waiting.after.clear()  # on the loop, they have given up their devices
        return job.spec.name

    assert "waits until b, c, d " in world.api.explain("a", show)["reason"]["sentence"]
    assert "waits until" not in world.api.explain("a", show)["reason"]["sentence"]


def test_doors_look_while_the_loop_works(tmp_path: Path) -> None:
    world = World(tmp_path)
    run = world.start("a", "n0/0", "n0/1")
    metrics, numbers = Metrics(world.api), iter(range(1_000_000))
    world.controller.start()

    def happen() -> None:
        number = next(numbers)
        run.on_event(StepDone(run.job_id, 1, number + 2, 2.0, 1.0, 1e-3, 64, number * 0.1))
        for rank in range(2):
            sample = StepSample(run.job_id, 1, number, rank, 0.1 * (1 + rank), {"compute": 0.1 * (1 + rank)})
            run.on_event(Sampled(run.job_id, 1, sample))
        if number % 20 == 0:
            world.submit(f"b{number}")
            world.api.cancel(f"b{number}")
        time.sleep(0.001)

    at_once(happen, world.api.jobs, world.api.nodes, lambda: world.api.describe("a"), metrics.text)
    world.controller.close(leave_jobs=True)
    assert "controller-fault" not in world.kinds()
    assert not run.closed, "its processes are left to the next controller"


def test_one_gives_up_asking_while_another_looks_who_asks() -> None:
    hub = AgentHub(Notes())
    node = Node(hub)
    node.connect()
    node.greet()

    def ask(timeout_s: float) -> None:
        with pytest.raises(UnreachableError, match="did not answer"):
            hub.ask("n0", {"do": "logs", "job_id": "j"}, timeout_s)

    class Since(float):
        def __rsub__(self, now: float) -> float:  # it is being looked at
            other.join(0.5)
            return 0.0

    other = threading.Thread(target=ask, args=(0.1,))
    other.start()
    while not node.orders:
        time.sleep(0.001)
    hub._nodes["n0"].asked[0] = SimpleNamespace(since_s=Since())  # type: ignore[assignment]
    ask(0.0)
    other.join(10)
    assert list(hub._nodes["n0"].asked) == [0]


def test_an_answer_at_the_last_moment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the node taken for one that does not answer."""
    hub = AgentHub(Notes())
    node = Node(hub)
    node.connect()
    node.greet()

    class Late(Future):
        def result(self, timeout: float | None = None) -> Any:
            if timeout is not None:
                node.say("logs", request=node.orders[-1]["request"], logs=[])
                raise TimeoutError
            return super().result(0)

    monkeypatch.setattr(agents, "Question", lambda since_s: SimpleNamespace(since_s=since_s, answer=Late()))
    for _ in range(2):
        assert hub.ask("n0", {"do": "logs", "job_id": "j"})["logs"] == []


def test_what_was_known_of_a_smaller_cluster_is_forgotten_whoever_asks_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = parse_cluster_shorthand("1x2:cpu"), parse_cluster_shorthand("2x2:cpu")
    priced, spec = GrowingPricing(small), parse_job(world.file("a"))
    assert max(option.num_devices for option in priced.curve(spec).options) == 2
    cache = pricing.lru_cache

    def asked_meanwhile(maxsize: int) -> Any:
        priced.curve(spec)
        return cache(maxsize)

    monkeypatch.setattr(pricing, "lru_cache", asked_meanwhile)
    priced.grow(large)
    assert max(option.num_devices for option in priced.curve(spec).options) == 4


def test_a_connection_that_begins_counts_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs ask without a lock how long a process has owed an answer, also in the midst of a reconnection."""
    now = [0.0]
    hub = AgentHub(Notes(), clock=lambda: now[0])
    node = Node(hub)
    node.connect()
    node.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, Job())
    hub.ping(["j.1.n0/0"])
    node.wire.beat()  # it has the question
    node.cut()
    now[0] = 50.0
    seen: list[float] = []

    def change(attached: agents.Attached, name: str, value: object) -> None:
        object.__setattr__(attached, name, value)
        seen.append(hub.unanswered_s("j.1.n0/0"))

    monkeypatch.setattr(agents.Attached, "__setattr__", change)
    node.connect()
    now[0] = 53.0
    assert hub.unanswered_s("j.1.n0/0") == 3.0, "the question was taken, and the same connection is asked"
    assert seen
    assert max(seen) == 0.0


def test_what_was_seen_last_of_devices_is_told_last() -> None:
    """One thread looks after a process' end, another when it connects."""
    first, told = threading.Event(), threading.Event()

    def dirty(own: object) -> dict[int, str]:
        if first.is_set():
            return {0: "in use by nobody"}
        first.set()
        told.wait(0.3)
        return {}

    inventory = SimpleNamespace(dirty=dirty, checks=True, num_devices=1, device_type="A100")
    said: list[dict[str, str]] = []
    outbox = Outbox(lambda number: None)
    outbox.connect(lambda frame: said.append(frame["m"]["dirty"]), 0, resumes=False)
    condition = Condition(inventory, None, outbox)
    slow = threading.Thread(target=condition.tell_dirty)
    slow.start()
    assert first.wait(10)
    condition.tell_dirty()
    told.set()
    slow.join(10)
    assert said[-1] == {"0": "in use by nobody"} == {str(k): v for k, v in condition._told_dirty.items()}
