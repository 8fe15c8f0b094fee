"""Numbered messages over connections that break: nothing that counts is lost or doubled, and nothing piles up."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from suika.agent.link import WINDOW, Wire
from suika.agent.outbox import newest_of


def step(process: str, number: int) -> dict[str, Any]:
    return {"event": "message", "process": process, "message": {"say": "step", "generation": 1, "step": number}}


def put(wire: Wire, event: dict[str, Any]) -> None:
    wire.put(event, newest_of(event))


class Peers:
    """Two ends in memory. What travels may be lost with the connection; acknowledgements come when `beat` is called."""

    def __init__(self) -> None:
        self.ours, self.theirs = Wire(), Wire()
        self.heard: list[dict[str, Any]] = []

    def connect(self, carries: int = 1 << 30) -> None:
        """A connection that is cut after so many frames."""
        left = [carries]

        def send(frame: dict[str, Any]) -> None:
            if left[0] == 0:
                raise ConnectionError
            left[0] -= 1
            if (message := self.theirs.take(frame)) is not None:
                self.heard.append(message)

        self.ours.connect(send, self.theirs.received)
        self.theirs.connect(self.ours.take, self.ours.received)

    def cut(self) -> None:
        self.ours.disconnect()
        self.theirs.disconnect()


def test_an_hour_without_a_controller_costs_no_memory() -> None:
    """Three ranks at ten steps a second, with samples and snapshots, and one that dies on the way."""
    peers = Peers()
    for number in range(36_000):
        for rank in range(3 if number < 20_000 else 2):
            put(peers.ours, step(f"j.1.n0/{rank}", number))
            if number % 100 == 0:
                for say in ("sample", "written"):
                    message = {"say": say, "generation": 1, "step": number}
                    put(peers.ours, {"event": "message", "process": f"j.1.n0/{rank}", "message": message})
        if number == 20_000:
            put(peers.ours, {"event": "exit", "process": "j.1.n0/2", "code": -9})
    assert len(peers.ours.unacknowledged()) == 3 * 3 + 1
    peers.connect()
    said = [event for event in peers.heard if event["event"] == "message"]
    steps = {event["process"]: event["message"]["step"] for event in said if event["message"]["say"] == "step"}
    assert steps == {"j.1.n0/0": 35_999, "j.1.n0/1": 35_999, "j.1.n0/2": 19_999}
    (exit_at,) = [at for at, event in enumerate(peers.heard) if event["event"] == "exit"]
    assert max(at for at, event in enumerate(peers.heard) if event["process"] == "j.1.n0/2") == exit_at


def test_a_slow_peer_is_told_less_instead_of_later() -> None:
    peers = Peers()
    peers.connect()
    for number in range(3 * WINDOW):
        put(peers.ours, step("j.1.n0/0", number))
    assert len(peers.heard) == WINDOW
    assert len(peers.ours.unacknowledged()) == WINDOW + 1
    peers.theirs.beat()
    assert peers.heard[-1]["message"]["step"] == 3 * WINDOW - 1
    assert len(peers.heard) == WINDOW + 1


def test_over_any_breaks_each_message_is_taken_once_and_in_order() -> None:
    for seed in range(200):
        dice, peers = random.Random(seed), Peers()
        for number in range(400):
            if dice.random() < 0.1:
                peers.cut()
            if dice.random() < 0.1:
                peers.connect(carries=dice.randrange(5))
            if dice.random() < 0.2:
                peers.theirs.beat()
            kind = {"event": "forked" if dice.random() < 0.5 else "exit", "process": f"p{number}", "pid": 1, "code": 0}
            put(peers.ours, kind if dice.random() < 0.5 else step(f"j.1.n0/{number % 3}", number))
        peers.cut()
        peers.connect()
        while peers.ours.unacknowledged():
            peers.theirs.beat()
        told = [event["process"] for event in peers.heard if event["event"] != "message"]
        assert max(Counter(told).values()) == 1
        numbers = [int(process[1:]) for process in told]
        assert numbers == sorted(numbers)
        for rank in range(3):
            steps = [e["message"]["step"] for e in peers.heard if e["process"] == f"j.1.n0/{rank}"]
            assert steps == sorted(set(steps))


def test_every_beginning_and_end_is_told() -> None:
    """The same as above, but counted: what has no newer word is never left out."""
    peers = Peers()
    for number in range(5 * WINDOW):
        put(peers.ours, {"event": "exit", "process": f"p{number}", "code": 0})
    peers.connect()
    while peers.ours.unacknowledged():
        peers.theirs.beat()
    assert [event["process"] for event in peers.heard] == [f"p{number}" for number in range(5 * WINDOW)]
