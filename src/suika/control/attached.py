"""A node as the controller knows it while it has a lease: how it introduces itself, and what is kept of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from suika.agent.link import OLDEST, PROTOCOL, WITH_ROLL_CALL, Message, Wire
from suika.core.cluster import Node
from suika.core.errors import require
from suika.runtime.rooms import NodeMemory

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
    pings: dict[str, Ping] = field(default_factory=dict)  # by process: the last one, unless it was answered
    asked: dict[int, Question] = field(default_factory=dict)  # by the request's number
    memory: NodeMemory | None = None  # what it said of it last; None: nothing
    mute_until_s: float = 0.0  # a question was not answered: none is asked until then

    def put_pings(self, processes: list[str]) -> None:
        """Ask the node which of these are alive. An older one is asked for each by itself."""
        orders: list[tuple[Message, list[str]]] = [({"do": "ping", "processes": processes}, processes)]
        if self.protocol < WITH_ROLL_CALL:
            orders = [({"do": "send", "process": p, "message": {"do": "ping"}}, [p]) for p in processes]
        for order, names in orders:
            self.pings.update(dict.fromkeys(names, Ping(order)))
            self.wire.put(order)


@dataclass
class Ping:
    order: Message
    taken_s: float | None = None  # the node is known to have it since then


@dataclass(frozen=True)
class Question:
    since_s: float
    answer: Future[Message] = field(default_factory=Future)


def parse_hello(hello: Any, identity: str) -> tuple[Node, str, bool]:
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
