"""The hub and an agent's end of it in memory: leases, breaks, restarts of either side, and what is refused."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from suika.agent.link import PROTOCOL, LinkError, Wire
from suika.agent.words import MOST_CALLED, SAID, check_event
from suika.control.agents import AgentHub, UnreachableError
from suika.control.sessions import Watcher
from suika.core.errors import SpecError
from suika.runtime.gang import COMMAND_ENTRY
from suika.runtime.rooms import Wish

HOLDING = {"say": "holding", "host": "h", "port": 1, "line": "l", "token": "t", "num_bytes": 0}


class Notes(Watcher):
    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []

    def arrived(self, node: Any, processes: Any) -> None:
        self.said.append(("arrived", node.name, dict(processes)))

    def dirty(self, node: str, devices: Any) -> None:
        self.said.append(("dirty", node, dict(devices)))

    def lost(self, node: str) -> None:
        self.said.append(("lost", node))


class Node:
    """An agent's end: what `suika.agent.program` does, without a fork server or a network."""

    def __init__(self, hub: AgentHub, name: str = "n0", incarnation: str = "first") -> None:
        self.hub, self.name, self.incarnation = hub, name, incarnation
        self.wire, self.controller, self.connection = Wire(), None, object()
        self.orders: list[dict[str, Any]] = []
        self.resumed = False

    def hello(self, **changes: Any) -> dict[str, Any]:
        node = {"name": self.name, "num_devices": 4, "device_type": "cpu"}
        said = {"protocol": PROTOCOL, "node": node, "incarnation": self.incarnation, "controller": self.controller}
        return said | {"received": self.wire.received} | changes

    def connect(self) -> None:
        self.connection = object()
        connection, received = self.connection, self.wire.received
        name, answer = self.hub.join(self.hello(), connection)
        self.resumed, self.controller = answer["resumes"], answer["controller"]
        if not self.resumed:
            self.wire, received = Wire(), 0

        def send(frame: dict[str, Any]) -> None:
            self.hub.receive(self.name, connection, json.dumps(frame))
            self.hub.acknowledge(self.name, connection)

        self.wire.connect(send, answer["received"])
        self.hub.ready(name, connection, self._hear, received)

    def _hear(self, frame: dict[str, Any]) -> None:
        order = self.wire.take(json.loads(json.dumps(frame)))
        if order is not None:
            self.orders.append(order)

    def cut(self, noticed: bool = True) -> None:
        """The connection breaks; `noticed`: by the controller too."""
        self.wire.disconnect()
        if noticed:
            self.hub.leave(self.name, self.connection)

    def say(self, event: str, **data: Any) -> None:
        self.wire.put({"event": event, **data})

    def greet(self, **processes: int) -> None:
        self.say("hello", processes=[{"process": p, "pid": pid} for p, pid in processes.items()])


class Job:
    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def __call__(self, event: dict[str, Any]) -> None:
        self.heard.append(event)

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.heard]


def serving(hub: AgentHub) -> tuple[Node, Job]:
    """A node that is there, and a job with one process on it."""
    node, job = Node(hub), Job()
    node.connect()
    node.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
    return node, job


@pytest.fixture
def made() -> tuple[AgentHub, Notes, list[float]]:
    now, notes = [0.0], Notes()
    return AgentHub(notes, lease_s=60.0, clock=lambda: now[0]), notes, now


def step(number: int) -> dict[str, Any]:
    numbers = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "num_tokens": 5, "at_s": 1.0}
    return {"say": "step", "generation": 1, "step": number, **numbers}


def test_orders_and_events_pass_and_are_taken_once(made: Any) -> None:
    hub, notes, _ = made
    node, job = Node(hub), Job()
    node.connect()
    node.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {"a": 1}, job)
    hub.send("j.1.n0/0", {"do": "start"})
    assert [order["do"] for order in node.orders] == ["fork", "send"]
    node.say("forked", process="j.1.n0/0", pid=7)
    node.say("message", process="j.1.n0/0", message=step(1))
    node.say("exit", process="j.1.n0/0", code=0)
    assert job.kinds == ["forked", "message", "exit"]
    assert notes.said == [("arrived", "n0", {})]


def test_a_break_below_the_lease_costs_nothing(made: Any) -> None:
    hub, notes, now = made
    node, job = serving(hub)
    for number, gap_s in enumerate((10.0, 30.0, 59.0)):
        node.cut(noticed=number % 2 == 0)
        hub.send("j.1.n0/0", {"do": "snapshot", "number": number})
        node.say("message", process="j.1.n0/0", message=step(number))
        now[0] += gap_s
        hub.expire()
        if number % 2 == 0:
            hub.ping(["j.1.n0/0"])  # answered in its place: it is not known to be dead
            assert job.heard[-1]["event"] == "unreachable"
        node.connect()
        assert node.resumed
    sent = [
        order["message"]["number"] for order in node.orders if order["do"] == "send" and "number" in order["message"]
    ]
    assert sent == [0, 1, 2]
    assert [e["message"]["step"] for e in job.heard if e["event"] == "message"] == [0, 1, 2]
    assert ("lost", "n0") not in notes.said
    assert not [e for e in job.heard if e["event"] == "exit"]


def test_after_the_lease_its_processes_are_dead_and_strangers_when_it_returns(made: Any) -> None:
    hub, notes, now = made
    node, job = serving(hub)
    node.cut()
    node.say("message", process="j.1.n0/0", message=step(50))
    now[0] += 61
    hub.expire()
    assert notes.said[-1] == ("lost", "n0")
    assert job.kinds == ["exit"]
    hub.spawn("j.2.n0/0", "n0", "entry", {}, job)  # nobody is there: dead at once, not waited for
    assert job.kinds == ["exit", "exit"]
    node.connect()
    assert not node.resumed
    node.greet(**{"j.1.n0/0": 7})
    node.say("message", process="j.1.n0/0", message=step(60))
    assert job.kinds == ["exit", "exit"]  # nothing of its old life counts
    node.say("message", process="j.9.n0/3", message=step(60))  # nobody ever asked for this one
    assert node.orders.pop() == {"do": "kill", "process": "j.9.n0/3"}
    assert notes.said[-1] == ("arrived", "n0", {"j.1.n0/0": 7})
    hub.kill("j.1.n0/0")
    assert node.orders[-1] == {"do": "kill", "process": "j.1.n0/0"}


def test_a_restarted_agent_goes_on_with_the_same_processes(made: Any) -> None:
    hub, notes, _ = made
    node, lives, dies = Node(hub), Job(), Job()
    node.connect()
    node.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, lives)
    hub.spawn("k.1.n0/1", "n0", "entry", {}, dies)
    node.wire.beat()  # taken
    node.cut()
    hub.send("j.1.n0/0", {"do": "snapshot"})
    again = Node(hub, incarnation="second")
    again.connect()
    assert not again.resumed
    again.greet(**{"j.1.n0/0": 7})
    assert [order["do"] for order in again.orders] == ["send"]
    assert dies.kinds == ["exit"]
    again.say("message", process="j.1.n0/0", message=step(3))
    assert lives.kinds == ["message"]
    assert notes.said[-1] == ("arrived", "n0", {})


def test_an_order_that_the_old_agent_never_took_is_given_to_the_new_one(made: Any) -> None:
    hub, _, _ = made
    node, job = Node(hub), Job()
    node.connect()
    node.greet()
    node.cut()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
    again = Node(hub, incarnation="second")
    again.connect()
    again.greet()
    assert [order["do"] for order in again.orders] == ["fork"]
    assert job.kinds == []


def test_a_new_controller_claims_what_runs_and_hears_what_was_said(made: Any) -> None:
    old, _, _ = made
    node = Node(old)
    node.connect()
    hub, notes = AgentHub(Notes()), None
    node.hub = hub
    node.connect()
    assert not node.resumed
    node.greet(**{"j.1.n0/0": 7, "x.1.n0/1": 8})
    node.say("message", process="j.1.n0/0", message=step(9))
    job = Job()
    hub.claim("j.1.n0/0", job)
    node.say("message", process="j.1.n0/0", message=step(10))
    assert job.kinds == ["forked", "message", "message"]
    assert job.heard[0]["pid"] == 7
    hub.claim("gone", job)
    assert job.heard[-1] == {"event": "exit", "process": "gone", "code": -9}
    assert notes is None


def test_an_older_agent_serves_on_and_is_asked_only_what_it_knows(made: Any) -> None:
    hub, notes, _ = made
    node, job = Node(hub), Job()
    hello = node.hello
    node.hello = lambda: hello(protocol=1)  # type: ignore[method-assign]
    node.connect()
    node.greet()
    assert notes.said == [("arrived", "n0", {})]
    hub.spawn("j.1.n0/0", "n0", COMMAND_ENTRY, {"generation": 1}, job)
    assert node.orders == []
    assert [event["event"] for event in job.heard] == ["message", "exit"]
    assert "upgrade it" in job.heard[0]["message"]["error"]
    with pytest.raises(UnreachableError, match="upgrade it"):
        hub.ask("n0", {"do": "logs", "job_id": "j"})
    hub.spawn("j.2.n0/0", "n0", "entry", {}, job)
    assert [order["do"] for order in node.orders] == ["fork"]
    hub.ping(["j.2.n0/0"])
    assert node.orders[-1]["message"] == {"do": "ping"}


def test_a_roll_call_is_one_order_and_one_answer(made: Any) -> None:
    hub, _, now = made
    node, job = Node(hub), Job()
    names = [f"j.1.n0/{index}" for index in range(3)]
    node.connect()
    node.greet()
    for name in names:
        hub.spawn(name, "n0", "entry", {}, job)
    assert hub.unanswered_s(names[0]) == 0.0
    hub.ping([*names, "gone"])
    assert node.orders[-1] == {"do": "ping", "processes": names}
    now[0] += 5.0
    node.wire.beat()  # acknowledges: from now on the node is known to have been asked
    now[0] += 3.0
    assert hub.unanswered_s(names[2]) == 3.0
    node.say("alive", processes=names[:2])
    assert [event["process"] for event in job.heard if event["event"] == "alive"] == names[:2]
    assert (hub.unanswered_s(names[0]), hub.unanswered_s(names[2])) == (0.0, 3.0)


def test_a_ping_that_its_node_has_not_taken_is_not_unanswered(made: Any) -> None:
    hub, _, now = made
    node, _ = serving(hub)
    node._hear = lambda frame: None  # type: ignore[method-assign]
    hub.ready("n0", node.connection, node._hear, node.wire.received)  # what is sent now goes nowhere, and nobody knows
    hub.ping(["j.1.n0/0"])
    now[0] += 30.0
    assert hub.unanswered_s("j.1.n0/0") == 0.0


def test_an_answer_that_a_break_holds_up_is_waited_for(made: Any) -> None:
    hub, _, now = made
    node, _ = serving(hub)
    hub.ping(["j.1.n0/0"])
    node.wire.beat()
    node.cut()
    now[0] += 30.0
    assert hub.unanswered_s("j.1.n0/0") == 0.0
    node.connect()
    now[0] += 2.0
    assert hub.unanswered_s("j.1.n0/0") == 2.0


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("protocol", [PROTOCOL, 2])
def test_a_restarted_agent_asks_anew_in_its_own_words(made: Any, protocol: int, taken: bool) -> None:
    hub, _, now = made
    node, job, gone = Node(hub), Job(), Job()
    node.connect()
    node.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
    hub.spawn("k.1.n0/1", "n0", "entry", {}, gone)
    node.wire.beat()
    if not taken:
        node._hear = lambda frame: None  # type: ignore[method-assign]
        hub.ready("n0", node.connection, node._hear, node.wire.received)
    hub.ping(["j.1.n0/0", "k.1.n0/1"])
    if taken:
        node.wire.beat()
    node.cut()
    again = Node(hub, incarnation="second")
    hello = again.hello
    again.hello = lambda **changes: hello(protocol=protocol, **changes)  # type: ignore[method-assign]
    again.connect()
    again.greet(**{"j.1.n0/0": 7})
    asked = [process for order in again.orders for process in order.get("processes", [order.get("process")])]
    assert asked == ["j.1.n0/0", "k.1.n0/1"]
    assert {order["do"] for order in again.orders} == {"ping" if protocol == PROTOCOL else "send"}
    again.wire.beat()
    now[0] += 5.0
    assert hub.unanswered_s("j.1.n0/0") == 5.0
    assert gone.kinds == ["exit"]
    assert list(hub._nodes["n0"].pings) == ["j.1.n0/0"]


def test_a_node_vouches_only_for_its_own_and_once(made: Any) -> None:
    hub, _, now = made
    node, other, job = Node(hub), Node(hub, "n1"), Job()
    for each in (node, other):
        each.connect()
        each.greet()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
    hub.ping(["j.1.n0/0"])
    node.wire.beat()
    now[0] += 5.0
    other.say("alive", processes=["j.1.n0/0"])
    assert job.kinds == []
    assert hub.unanswered_s("j.1.n0/0") == 5.0
    node.say("alive", processes=["j.1.n0/0"] * 1000)
    assert job.kinds == ["alive"]
    with pytest.raises(LinkError, match="bounded length"):
        check_event({"event": "alive", "processes": ["x"] * (MOST_CALLED + 1)})


@pytest.mark.parametrize(("protocol", "fix"), [(PROTOCOL + 1, "upgrade the controller"), (0, "upgrade the agent")])
def test_the_refusal_of_a_protocol_says_who_must_follow(made: Any, protocol: int, fix: str) -> None:
    with pytest.raises(SpecError) as refusal:
        made[0].join(Node(made[0]).hello(protocol=protocol), object())
    assert refusal.value.fix == fix


def test_a_question_is_answered_by_the_node_that_was_asked(made: Any) -> None:
    hub, _, _ = made
    nodes = [Node(hub, name) for name in ("n0", "n1")]
    for node in nodes:
        node.connect()
        node.greet()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(hub.ask, "n0", {"do": "logs", "job_id": "j"})
        while not nodes[0].orders:
            time.sleep(0.001)
        number = nodes[0].orders[0]["request"]
        nodes[1].say("logs", request=number, logs=[["j.1.n1/0", 0, 1]])  # not asked
        nodes[0].say("logs", request=number, logs=[["j.1.n0/0", 0, 5]])
        nodes[0].say("logs", request=number, logs=[])  # said twice
        assert asked.result(10)["logs"] == [["j.1.n0/0", 0, 5]]
    with pytest.raises(UnreachableError, match="did not answer"):
        hub.ask("n0", {"do": "logs", "job_id": "j"}, timeout_s=0.01)
    nodes[0].say("logs", request=number + 1, logs=[])  # late
    with pytest.raises(UnreachableError, match="did not answer"):
        hub.ask("n0", {"do": "logs", "job_id": "j"}, timeout_s=0.01)
    nodes[0].cut()
    with pytest.raises(UnreachableError, match="not connected"):
        hub.ask("n0", {"do": "logs", "job_id": "j"})


def test_a_node_that_hangs_is_waited_for_once(made: Any) -> None:
    hub, _, now = made
    node = Node(hub)
    node.connect()
    node.greet()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(hub.ask, "n0", {"do": "logs", "job_id": "j"}, 1.0)
        while not node.orders:
            time.sleep(0.001)
        now[0] += 2.0
        with pytest.raises(UnreachableError, match="does not answer at present"):
            hub.ask("n0", {"do": "logs", "job_id": "j"}, timeout_s=30.0)
        with pytest.raises(UnreachableError, match="did not answer for 1 s"):
            asked.result(10)
    with pytest.raises(UnreachableError, match="does not answer at present"):
        hub.ask("n0", {"do": "logs", "job_id": "j"}, timeout_s=30.0)
    now[0] += 31.0
    with pytest.raises(UnreachableError, match="did not answer"):  # it is tried again
        hub.ask("n0", {"do": "logs", "job_id": "j"}, timeout_s=0.01)
    assert len(node.orders) == 2


def test_what_memory_a_node_has_is_known_until_it_is_lost(made: Any) -> None:
    hub, _, now = made
    node, old = Node(hub), Node(hub, "n1")
    for each in (node, old):
        each.connect()
        each.greet()
    node.say("memory", total_bytes=900, available_bytes=700, limit_bytes=450)
    assert hub.rooms.limits() == {"n0": 450, "n1": None}
    node.say("memory", total_bytes=900, available_bytes=99, limit_bytes=450)
    wish = Wish({"n1": 50}, {"n1": 50})
    assert hub.rooms.settle("j", wish, {}).lacking is not None, "n0 has 99 left, not twice 50"
    node.say("memory", total_bytes=900, available_bytes=100, limit_bytes=450)
    assert hub.rooms.settle("j", wish, {}).keepers == {"n1": "n0"}
    now[0] += 61.0
    hub.expire()
    assert hub.rooms.limits() == {}


def test_two_nodes_of_one_name(made: Any) -> None:
    hub, _, _ = made
    node = Node(hub)
    node.connect()
    with pytest.raises(SpecError, match="is connected already"):
        Node(hub, incarnation="other").connect()


@pytest.mark.parametrize(
    "changes",
    [
        {"protocol": PROTOCOL + 1},
        {"protocol": 0},
        {"protocol": True},
        {"protocol": "2"},
        {"node": {"name": "../x", "num_devices": 4, "device_type": "cpu"}},
        {"node": {"name": "n0", "num_devices": True, "device_type": "cpu"}},
        {"node": {"name": "n0", "num_devices": 0, "device_type": "cpu"}},
        {"node": {"name": "n0", "num_devices": 4, "device_type": "cpu", "owner": "me"}},
        {"node": []},
        {"incarnation": 7},
    ],
)
def test_agents_that_are_not_taken(made: Any, changes: dict[str, Any]) -> None:
    hub, notes, _ = made
    with pytest.raises(SpecError):
        hub.join(Node(hub).hello(**changes), object())
    assert (hub.nodes, notes.said) == ({}, [])


@pytest.mark.parametrize(
    "frame",
    [
        "",
        "[]",
        "[" * 100_000,
        "{}",
        '{"ack": -1}',
        '{"ack": true}',
        '{"ack": 99}',
        '{"ack": 0, "n": 9, "m": {"event": "devices", "dirty": {}}}',
        '{"ack": 0, "n": 1, "m": 3}',
        '{"ack": 0, "n": 1, "m": {"event": "reboot"}}',
        '{"ack": 0, "n": 1, "m": {"event": "logs"}}',
        '{"ack": 0, "n": 1, "m": {"event": "memory", "total_bytes": 9, "available_bytes": 5}}',
        json.dumps(
            {"ack": 0, "n": 1, "m": {"event": "message", "process": "p", "message": HOLDING | {"request": "1"}}}
        ),
        '{"ack": 0, "n": 1, "m": {"event": "memory", "total_bytes": 9, "available_bytes": true, "limit_bytes": 3}}',
        '{"ack": 0, "n": 1, "m": {"event": "logs", "request": 1, "logs": [["p", 0]]}}',
        '{"ack": 0, "n": 1, "m": {"event": "logs", "request": 1, "logs": [["p", 0, true]]}}',
        '{"ack": 0, "n": 1, "m": {"event": "logs", "request": 1, "data": 5, "next": 0}}',
        '{"ack": 0, "n": 1, "m": {"event": "message", "process": "j.1.n0/0", "message": {"say": "exited"}}}',
        '{"ack": 0, "n": 1, "m": {"event": "message", "process": "p", "message": {"say": "place", "host": 1}}}',
        '{"ack": 0, "n": 1, "m": {"event": "exit", "process": "j.1.n0/0", "code": "0"}}',
        '{"ack": 0, "n": 1, "m": {"event": "message", "process": "j.1.n0/0", "message": {"say": "step"}}}',
        '{"ack": 0, "n": 1, "m": {"event": "message", "process": "j.1.n0/0", "message": {"say": "sample"}}}',
    ],
)
def test_frames_that_are_refused_change_nothing(made: Any, frame: str) -> None:
    hub, notes, _ = made
    node, job = Node(hub), Job()
    node.connect()
    hub.spawn("j.1.n0/0", "n0", "entry", {}, job)
    before = (list(notes.said), hub.nodes, list(job.heard))
    with pytest.raises(LinkError):
        hub.receive("n0", node.connection, frame)
    assert (list(notes.said), hub.nodes, list(job.heard)) == before
    node.greet(**{"j.1.n0/0": 4})  # and the session is as it was
    assert notes.said[-1][0] == "arrived"


def test_a_word_of_a_newer_version_is_passed_over(made: Any) -> None:
    hub, _, _ = made
    node, job = serving(hub)
    node.say("message", process="j.1.n0/0", message={"say": "hum", "tune": 3})
    node.say("message", process="j.1.n0/0", message=step(1))
    assert [event["message"]["say"] for event in job.heard] == ["step"]


def test_every_word_of_the_runtime_is_known() -> None:
    """What ranks and stores say is found in their source: a new word must be let through here too."""
    import suika.runtime

    source = "".join(path.read_text() for path in Path(suika.runtime.__file__).parent.glob("*.py"))
    said = set(re.findall(r'say\("(\w+)"', source)) | set(re.findall(r'"say": "(\w+)"', source))
    assert {"step", "verified", "store"} <= said
    assert said <= set(SAID)
