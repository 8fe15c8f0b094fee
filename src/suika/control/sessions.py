"""The agents' side of the hub: sessions over connections that break and come again, leases, and what nodes say.

A node whose connection broke keeps its lease: orders wait for it, nothing is held against its jobs. When the lease has
run out its processes count as dead, for good: if the node comes back they are strangers, and it kills them before it
offers a device again. Nothing a node sends is acted on before it has been checked whole.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from suika.agent.link import Frame, LinkError, Message, Wire
from suika.agent.words import check_event
from suika.control.attached import Attached, parse_hello
from suika.core.cluster import Node
from suika.core.errors import SpecError
from suika.runtime.rooms import NodeMemory, Rooms

LEASE_S = 60.0
_TICK_S = 0.5
_KEPT_UNCLAIMED = 10_000


class Watcher:
    """What the hub tells its owner; called on a connection's or the hub's own thread."""

    def arrived(self, node: Node, processes: Mapping[str, int]) -> None:
        """The node is here, with these processes (name -> pid) that nobody has claimed: claim or kill each."""

    def dirty(self, node: str, devices: Mapping[int, str]) -> None:
        """All devices of the node that are not clean, with the reason; the others are."""

    def lost(self, node: str) -> None:
        """Its lease has run out."""


class Sessions:
    """Of all nodes. Safe from any thread. `identity` changes with each controller: an agent knows by it that its orders
    are gone."""

    def __init__(self, watcher: Watcher, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic) -> None:
        self.identity = secrets.token_hex(8)
        self.lease_s = lease_s
        self.watcher = watcher
        self.rooms = Rooms(self._memory)
        self._clock = clock
        self._lock = threading.RLock()
        self._nodes: dict[str, Attached] = {}
        self._where: dict[str, str] = {}  # process -> node
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

    # -- connections --------------------------------------------------------------------------------------------------

    def join(self, hello: Any, connection: object) -> tuple[str, Frame]:
        """An agent's first message on a new connection. Returns the node's name and the answer, which the caller
        sends before it calls `ready`. Raises `SpecError` for an agent that cannot be taken."""
        node, incarnation, resumes = parse_hello(hello, self.identity)
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
                fresh.put_pings(list(known.pings))
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
