"""The controller's side of node agents: leases, orders and events over the connections that agents open.

`AgentHub` is a `runtime.messages.Processes`: a job's coordinator does not know where its processes are. A node whose
connection broke keeps its lease: orders wait for it, nothing is held against its jobs. When the lease has run out its
processes count as dead, for good: if the node comes back they are strangers, and it kills them before it offers a
device again. Nothing a node sends is acted on before it has been checked whole.
"""

from __future__ import annotations

import itertools
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from suika.agent.link import OLDEST, PROTOCOL, WITH_COMMANDS, WITH_ROLL_CALL, Frame, LinkError, Message, Wire
from suika.agent.words import check_event
from suika.core.cluster import Node
from suika.core.errors import SpecError, require
from suika.runtime.gang import COMMAND_ENTRY, NOT_STARTED
from suika.runtime.rooms import NodeMemory, Rooms

LEASE_S = 60.0
_TICK_S = 0.5
ASK_WAIT_S = 5.0  # for a node's answer to a question
_ASK_PATIENCE_S, _ASK_AGAIN_S = 1.0, 30.0  # an answer is out so long: nobody else waits; it never came: until then
_KEPT_UNCLAIMED = 10_000
Listener = Callable[[Message], None]


@dataclass
class Attached:
    """A node as the hub knows it. `listeners`: who hears of each process; None for one that nobody has claimed."""

    node: Node
    incarnation: str
    wire: Wire
    heard_s: float
    protocol: int = PROTOCOL
    connection: object | None = None  # identity of the live connection
    joined_s: float = 0.0  # when that began
    greeted: bool = False  # it has told which processes it has
    ordered: set[str] = field(default_factory=set)  # asked for before that: no part of what it tells
    listeners: dict[str, Listener | None] = field(default_factory=dict)
    unclaimed: dict[str, deque[Message]] = field(default_factory=dict)
    pings: dict[str, _Ping] = field(default_factory=dict)  # by process: the last one, unless it was answered
    asked: dict[int, _Question] = field(default_factory=dict)  # by the request's number
    memory: NodeMemory | None = None  # what it said of it last; None: nothing
    mute_until_s: float = 0.0  # a question was not answered: none is asked until then


@dataclass
class _Ping:
    order: Message
    taken_s: float | None = None  # the node is known to have it since then


@dataclass(frozen=True)
class _Question:
    since_s: float
    answer: Future[Message] = field(default_factory=Future)


class UnreachableError(RuntimeError):
    """The node is not connected now, or does not answer."""


class Watcher:
    """What the hub tells its owner; called on a connection's or the hub's own thread."""

    def arrived(self, node: Node, processes: Mapping[str, int]) -> None:
        """The node is here, with these processes (name -> pid) that nobody has claimed: claim or kill each."""

    def dirty(self, node: str, devices: Mapping[int, str]) -> None:
        """All devices of the node that are not clean, with the reason; the others are."""

    def lost(self, node: str) -> None:
        """Its lease has run out."""


class AgentHub:
    """Safe from any thread. `identity` changes with each controller: an agent knows by it that its orders are gone."""

    def __init__(self, watcher: Watcher, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.identity = secrets.token_hex(8)
        self.lease_s = lease_s
        self.watcher = watcher
        self.rooms = Rooms(self._memory)
        self._clock = clock
        self._lock = threading.RLock()
        self._nodes: dict[str, Attached] = {}
        self._where: dict[str, str] = {}  # process -> node
        self._requests = itertools.count(1)
        self._stopped = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="leases", daemon=True)

    def start(self) -> None:
        self._ticker.start()

    def close(self) -> None:
        self._stopped.set()

    def _tick(self) -> None:
        while not self._stopped.wait(_TICK_S):
            self.expire()

    @property
    def nodes(self) -> dict[str, bool]:
        """Nodes with a lease, and whether they are connected now."""
        with self._lock:
            return {name: attached.connection is not None for name, attached in self._nodes.items()}

    def _memory(self) -> dict[str, NodeMemory | None]:
        with self._lock:
            return {name: attached.memory for name, attached in self._nodes.items()}

    # -- Processes ----------------------------------------------------------------------------------------------------

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Listener) -> None:
        with self._lock:
            attached = self._nodes.get(node)
            if attached is not None:
                assert process not in attached.listeners, f"{process} runs already"
                attached.listeners[process] = listener
                self._where[process] = node
                if not attached.greeted:
                    attached.ordered.add(process)
                if entry == COMMAND_ENTRY and attached.protocol < WITH_COMMANDS:
                    self._refuse(attached, process, launch["generation"])
                    return
                attached.wire.put({"do": "fork", "process": process, "entry": entry, "launch": dict(launch)})
        if attached is None:
            listener({"event": "exit", "process": process, "code": -9})

    def _refuse(self, attached: Attached, process: str, generation: int) -> None:
        """In the place of an agent that does not know what a command is."""
        listener = attached.listeners.pop(process)
        self._where.pop(process, None)
        attached.ordered.discard(process)
        assert listener is not None
        error = f"the agent of {attached.node.name} is of an older version, which runs no commands: upgrade it"
        said = {"say": "no-start", "generation": generation, "error": error, "code": NOT_STARTED}
        listener({"event": "message", "process": process, "message": said})
        listener({"event": "exit", "process": process, "code": NOT_STARTED})

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        with self._lock:
            attached = self._of(process)
            if attached is None:
                return
            attached.wire.put({"do": "send", "process": process, "message": dict(message)})

    def ping(self, processes: Collection[str]) -> None:
        with self._lock:
            asked: dict[str, list[str]] = {}
            for process in processes:
                if self._of(process) is not None:
                    asked.setdefault(self._where[process], []).append(process)
            for attached, names in [(self._nodes[node], names) for node, names in asked.items()]:
                if attached.connection is not None:
                    self._put_pings(attached, names)
                    continue
                for name in names:  # a broken connection is no sign of a dead process: the lease decides
                    if (listener := attached.listeners.get(name)) is not None:
                        listener({"event": "unreachable", "process": name})

    def _put_pings(self, attached: Attached, processes: list[str]) -> None:
        orders: list[tuple[Message, list[str]]] = [({"do": "ping", "processes": processes}, processes)]
        if attached.protocol < WITH_ROLL_CALL:
            orders = [({"do": "send", "process": p, "message": {"do": "ping"}}, [p]) for p in processes]
        for order, names in orders:
            attached.pings.update(dict.fromkeys(names, _Ping(order)))
            attached.wire.put(order)

    def kill(self, process: str) -> None:
        with self._lock:
            attached = self._of(process)
            if attached is not None:
                attached.wire.put({"do": "kill", "process": process})

    def unanswered_s(self, process: str) -> float:
        # Without the lock: a thousand jobs that wonder at once must not hold up the very answers they wait for.
        attached = self._of(process)
        ping = attached.pings.get(process) if attached is not None else None
        taken_s = ping.taken_s if ping is not None else None
        if attached is None or attached.connection is None or taken_s is None:
            return 0.0
        return self._clock() - max(taken_s, attached.joined_s)  # a break held up the answer, too

    def claim(self, process: str, listener: Listener) -> None:
        """From now on `listener` hears of a process that ran before; first of what it has said since."""
        with self._lock:
            attached = self._of(process)
            if attached is None or process not in attached.listeners:
                said: list[Message] = [{"event": "exit", "process": process, "code": -9}]
            else:
                attached.listeners[process] = listener
                said = list(attached.unclaimed.pop(process, ()))
            for event in said:
                listener(event)

    def ask(self, node: str, order: Message, timeout_s: float = ASK_WAIT_S) -> Message:
        """The node's answer to a question about its logs. Blocks, but not for a node that is known to hang: one
        question finds that out for all. Raises `UnreachableError`."""
        number = next(self._requests)
        with self._lock:
            attached, now = self._nodes.get(node), self._clock()
            if attached is None or attached.connection is None:
                raise UnreachableError(f"{node} is not connected")
            if attached.protocol < WITH_COMMANDS:
                raise UnreachableError(f"the agent of {node} is of an older version, which shows no logs: upgrade it")
            hangs = any(now - question.since_s > _ASK_PATIENCE_S for question in attached.asked.values())
            if hangs or now < attached.mute_until_s:
                raise UnreachableError(f"{node} does not answer at present")
            question = attached.asked[number] = _Question(now)
            attached.wire.put(order | {"request": number})
        with suppress(TimeoutError):
            return question.answer.result(timeout_s)
        with self._lock:
            if attached.asked.pop(number, None) is None:
                return question.answer.result()  # it came at the last moment
            attached.mute_until_s = self._clock() + _ASK_AGAIN_S
        raise UnreachableError(f"{node} did not answer for {timeout_s:.0f} s")

    def _of(self, process: str) -> Attached | None:
        return self._nodes.get(self._where.get(process, ""))

    # -- connections --------------------------------------------------------------------------------------------------

    def join(self, hello: Any, connection: object) -> tuple[str, Frame]:
        """An agent's first message on a new connection. Returns the node's name and the answer, which the caller
        sends before it calls `ready`. Raises `SpecError` for an agent that cannot be taken."""
        node, incarnation, resumes = _parse_hello(hello, self.identity)
        spoken = hello["protocol"]
        with self._lock:
            known = self._nodes.get(node.name)
            if known is not None and known.incarnation != incarnation and known.connection is not None:
                raise SpecError("node.name", node.name, "is connected already", "names of nodes must be unique")
            resumes = resumes and known is not None and known.incarnation == incarnation and known.node == node
            if known is None or not resumes:
                known = self._begin(node, incarnation, spoken, known)
            known.heard_s = known.joined_s = self._clock()
            known.connection = connection  # last: `unanswered_s` takes no lock
            known.wire.disconnect()
            answer = {"controller": self.identity, "resumes": resumes, "received": known.wire.received}
            return node.name, answer | {"lease_s": self.lease_s}

    def _begin(self, node: Node, incarnation: str, protocol: int, known: Attached | None) -> Attached:
        """A session anew; orders that may not have been taken by the earlier incarnation are given again. Whoever had
        not answered is asked again: the answer may have been lost with it."""
        fresh = Attached(node, incarnation, Wire(), self._clock(), protocol)
        if known is not None:
            fresh.listeners = known.listeners
            for order in known.wire.unacknowledged():
                if order["do"] == "ping":
                    continue
                fresh.wire.put(order)
                if order["do"] == "fork":
                    fresh.ordered.add(order["process"])
            if known.pings:
                self._put_pings(fresh, list(known.pings))
        self._nodes[node.name] = fresh
        return fresh

    def ready(self, name: str, connection: object, send: Callable[[Frame], None], peer_received: int) -> None:
        """The answer to `join` is on its way: frames may follow."""
        with self._lock:
            attached = self._nodes.get(name)
            if attached is not None and attached.connection is connection:
                attached.wire.connect(send, peer_received)

    def receive(self, name: str, connection: object, text: str | bytes) -> None:
        """A frame has come. Raises `LinkError`, before anything has changed, for one that is not in order. Takes no
        time; the caller sees to it that `acknowledge` follows soon."""
        try:
            frame = json.loads(text)
        except (ValueError, RecursionError):
            raise LinkError("a frame is not JSON") from None
        known = check_event(frame["m"]) if isinstance(frame, dict) and isinstance(frame.get("m"), dict) else True
        with self._lock:
            attached = self._nodes.get(name)
            if attached is None or attached.connection is not connection:
                raise LinkError("this connection has been replaced, or its lease has run out")
            event = attached.wire.take(frame)
            attached.heard_s = self._clock()
            for ping in attached.pings.values():
                if ping.taken_s is None and not attached.wire.holds(ping.order):
                    ping.taken_s = attached.heard_s
            if event is not None and known:
                self._hear(attached, event)

    def acknowledge(self, name: str, connection: object) -> None:
        """Say what was taken, which is also a sign of life."""
        with self._lock:
            attached = self._nodes.get(name)
            if attached is not None and attached.connection is connection:
                attached.wire.beat()

    def leave(self, name: str, connection: object) -> None:
        """The connection broke; the lease goes on."""
        with self._lock:
            attached = self._nodes.get(name)
            if attached is not None and attached.connection is connection:
                attached.connection = None
                attached.wire.disconnect()

    # -- what nodes say -----------------------------------------------------------------------------------------------

    def _hear(self, attached: Attached, event: Message) -> None:
        """Listeners put events into inboxes: that keeps their order, and takes no time."""
        if event["event"] == "hello":
            self._greet(attached, {entry["process"]: entry["pid"] for entry in event["processes"]})
            return
        if event["event"] == "devices":
            self.watcher.dirty(attached.node.name, {int(index): why for index, why in event["dirty"].items()})
            return
        if event["event"] == "memory":
            attached.memory = NodeMemory(*(event[f"{kind}_bytes"] for kind in ("total", "available", "limit")))
            return
        if event["event"] == "logs":
            attached.mute_until_s = 0.0  # late, but it answers
            question = attached.asked.pop(event["request"], None)
            if question is not None:
                question.answer.set_result(event)
            return
        if event["event"] == "alive":
            for process in event["processes"]:
                listener = attached.listeners.get(process)
                if attached.pings.pop(process, None) is not None and listener is not None:  # it was asked: tell it once
                    listener({"event": "alive", "process": process})
            return
        process = event["process"]
        attached.pings.pop(process, None)
        if process not in attached.listeners:
            if event["event"] != "exit" and attached.greeted:  # it counts as dead: make it so
                attached.wire.put({"do": "kill", "process": process}, newest_of=("kill", process))
            return
        listener = attached.listeners[process]
        if event["event"] == "exit":
            del attached.listeners[process]
            self._where.pop(process, None)
            attached.unclaimed.pop(process, None)
        if listener is not None:
            listener(event)
        elif event["event"] != "exit":
            attached.unclaimed.setdefault(process, deque(maxlen=_KEPT_UNCLAIMED)).append(event)

    def _greet(self, attached: Attached, found: dict[str, int]) -> None:
        """All processes of the node: those that are gone have ended, strangers are the owner's to judge."""
        for process in [p for p in attached.listeners if p not in found and p not in attached.ordered]:
            listener = attached.listeners.pop(process)
            self._where.pop(process, None)
            attached.pings.pop(process, None)
            if listener is not None:
                listener({"event": "exit", "process": process, "code": -9})
        strangers = {process: pid for process, pid in found.items() if attached.listeners.get(process) is None}
        for process in strangers:
            attached.listeners[process] = None
            forked: Message = {"event": "forked", "process": process, "pid": found[process]}
            attached.unclaimed[process] = deque([forked], maxlen=_KEPT_UNCLAIMED)
            self._where[process] = attached.node.name
        attached.greeted = True
        attached.ordered.clear()
        self.watcher.arrived(attached.node, strangers)

    # -- leases -------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Give up nodes that have not been heard of for a lease: their processes are dead to us."""
        with self._lock:
            now = self._clock()
            for name in [n for n, a in self._nodes.items() if now - a.heard_s > self.lease_s]:
                attached = self._nodes.pop(name)
                attached.wire.disconnect()
                self.watcher.lost(name)
                for process, listener in attached.listeners.items():
                    self._where.pop(process, None)
                    if listener is not None:
                        listener({"event": "exit", "process": process, "code": -9, "unreachable": True})


def _parse_hello(hello: Any, identity: str) -> tuple[Node, str, bool]:
    """(node, incarnation, whether it knows this very controller)."""
    require(isinstance(hello, dict), "hello", type(hello).__name__, "must be an object")
    spoken = hello.get("protocol")
    whole = isinstance(spoken, int) and not isinstance(spoken, bool)
    problem = f"speaks agent protocol {str(spoken)[:20]}, the controller {OLDEST} to {PROTOCOL}"
    ahead = whole and spoken > PROTOCOL
    fix = "upgrade the controller" if ahead else "upgrade the agent"
    require(whole and OLDEST <= spoken <= PROTOCOL, "protocol", str(spoken)[:20], problem, fix)
    fields, incarnation = hello.get("node"), hello.get("incarnation")
    known = {"name", "num_devices", "device_type", "domain_size", "rack", "pod"}
    good = isinstance(fields, dict) and set(fields) <= known and {"name", "num_devices", "device_type"} <= set(fields)
    require(good, "node", str(fields)[:100], f"must have the fields {', '.join(sorted(known))}")
    for name, kind in (("num_devices", int), ("domain_size", int), ("device_type", str), ("rack", str), ("pod", str)):
        value = fields.get(name, kind())
        right = isinstance(value, kind) and not isinstance(value, bool) and len(str(value)) <= 63
        require(right, f"node.{name}", str(value)[:63], f"must be of kind {kind.__name__}")
    received = hello.get("received")
    counted = isinstance(received, int) and not isinstance(received, bool) and received >= 0
    require(counted, "received", str(received)[:63], "must be a whole number")
    require(isinstance(incarnation, str) and 0 < len(incarnation) <= 64, "incarnation", None, "is missing")
    return Node(**fields), incarnation, hello.get("controller") == identity
