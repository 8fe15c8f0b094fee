"""Who is asked for a sign of life: nobody who has just taken part in a step, everybody once steps stay away."""

from __future__ import annotations

import math
import queue
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import pytest

from suika.agent.roll import WITHIN_S
from suika.core.cluster import Device
from suika.runtime.gang import RANK_ENTRY, DiedError, Gang, Limits


class Time:
    """The gang's clock and its inbox: time passes only while it waits for something to arrive."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._arrived: deque[dict[str, Any]] = deque()

    def monotonic(self) -> float:
        return self.now_s

    def put(self, event: dict[str, Any]) -> None:
        self._arrived.append(event)

    def empty(self) -> bool:
        return not self._arrived

    def get(self, timeout: float) -> dict[str, Any]:
        if self._arrived:
            return self._arrived.popleft()
        self.now_s += timeout
        raise queue.Empty


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("suika.runtime.gang.time", made)
    return made


def gang_of(processes: Asked, clock: Time, limits: Limits) -> Gang:
    made = Gang("j", processes, lambda member, message: None, limits)
    made._inbox = clock  # type: ignore[assignment]
    return made


class Asked:
    def __init__(self) -> None:
        self.pinged: list[str] = []
        self.killed: list[str] = []
        self.known_s = math.inf

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: object) -> None:
        pass

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        pass

    def ping(self, processes: Collection[str]) -> None:
        self.pinged += processes

    def kill(self, process: str) -> None:
        self.killed.append(process)

    def unanswered_s(self, process: str) -> float:
        return self.known_s


def test_a_step_vouches_for_all_its_ranks(clock: Time) -> None:
    processes = Asked()
    gang = gang_of(processes, clock, Limits(silent_s=0.6, answer_s=0.6))
    ranks = [gang.spawn(f"j.1.n0/{index}", "n0", Device("n0", index), RANK_ENTRY, {}) for index in range(8)]
    joiner = gang.spawn("j.2.n1/0", "n1", Device("n1", 0), RANK_ENTRY, {})
    while clock.now_s < 1.0:
        gang.vouch(ranks)
        gang.pump()
    assert set(processes.pinged) == {joiner.process}, "it takes part in no step yet"

    def listen() -> None:
        while True:
            clock.now_s += 0.05
            gang.post({"event": "message", "process": joiner.process, "message": {"say": "pong"}})
            gang.pump()

    with pytest.raises(DiedError, match="did not answer"):
        listen()
    assert {rank.process for rank in ranks} <= set(processes.pinged)
    assert processes.killed[0] in {rank.process for rank in ranks}


def test_a_question_that_is_held_up_on_its_way_is_no_sign_of_death(clock: Time) -> None:
    processes = Asked()
    processes.known_s = 0.0
    gang = gang_of(processes, clock, Limits(silent_s=0.1, answer_s=0.1))
    gang.spawn("j.1.n0/0", "n0", Device("n0", 0), RANK_ENTRY, {})
    while clock.now_s < 1.0:
        gang.pump()
    assert len(processes.pinged) >= 2, "one that seems lost is asked again"
    assert not processes.killed
    processes.known_s = 0.06

    def listen() -> None:
        while True:
            gang.pump()

    with pytest.raises(DiedError, match="did not answer"):
        listen()


def test_nobody_is_asked_before_the_next_step_is_overdue(clock: Time) -> None:
    processes = Asked()
    gang = gang_of(processes, clock, Limits(silent_s=0.4, answer_s=0.4))
    ranks = [gang.spawn("j.1.n0/0", "n0", Device("n0", 0), RANK_ENTRY, {})]
    for took_s, within_s, asked in ((0.0, 0.6, 1), (0.4, 0.35, 0), (60.0, 0.75, 1)):
        processes.pinged.clear()
        gang.vouch(ranks, took_s)
        until_s = clock.now_s + within_s
        while clock.now_s < until_s:
            gang.pump(until_s)
        assert len(processes.pinged) == asked, took_s


def test_a_stopped_process_is_noticed_within_20_s() -> None:
    """The worst case: its last answer waited for others', steps are long, each look comes a tick late."""
    limits = Limits()
    gang = Gang("j", Asked(), lambda member, message: None, limits)
    gang._spread = 1.0
    gang.vouch([], took_s=60.0)
    assert WITHIN_S + gang._silent_s + limits.answer_s + 2 * gang.tick_s < 20
