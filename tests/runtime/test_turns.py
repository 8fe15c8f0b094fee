"""One thread listens for all runs; what takes time has a thread of its own, and nothing is lost between the two."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Any

import pytest

from suika.runtime import turns
from suika.runtime.turns import Run, Turns


class Counting(Run):
    """Takes in numbers in order. Odd ones are said to take time, and do if `slow_s`; negative ones are errors."""

    def __init__(self, shared: Turns, slow_s: float = 0.0, look_every_s: float = 0.05) -> None:
        self.inbox: deque[int] = deque()
        self.taken: list[tuple[int, str]] = []  # number, thread
        self.raised: list[BaseException] = []
        self.looks = 0
        self._slow_s, self._closed = slow_s, False
        self._inside = threading.Lock()
        super().__init__("own", look_every_s, shared)
        self.rest()

    def post(self, number: int) -> None:
        self.inbox.append(number)
        self.wake()

    def close(self) -> None:
        self._closed = True
        self.wake()
        assert self.await_end(5)

    def _listen(self) -> bool:
        self.looks += 1
        assert self._inside.acquire(blocking=False), "two threads at once"
        try:
            while self.inbox and not self._closed:
                if self.inbox[0] < 0:
                    raise ValueError(self.inbox.popleft())
                if self.inbox[0] % 2:
                    return False
                self._take()
            return not self._closed
        finally:
            self._inside.release()

    def _carry_out(self) -> bool:
        assert self._inside.acquire(blocking=False), "two threads at once"
        try:
            try:
                self._hand_back()
            except ValueError as error:
                self.raised.append(error)
            while self.inbox:
                time.sleep(self._slow_s)
                self._take()
            return self._closed
        finally:
            self._inside.release()

    def _take(self) -> None:
        self.taken.append((self.inbox.popleft(), threading.current_thread().name))


def _wait(condition: Any, wait_s: float = 10.0) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_hundreds_of_runs_share_a_thread() -> None:
    shared = Turns()
    runs = [Counting(shared, look_every_s=60.0) for _ in range(300)]
    before = threading.active_count()
    for number in range(0, 20, 2):
        for run in runs:
            run.post(number)
    _wait(lambda: all(len(run.taken) == 10 for run in runs))
    assert threading.active_count() == before
    assert {name for run in runs for _, name in run.taken} == {"jobs"}
    for run in runs:
        run.close()


def test_nothing_is_lost_or_doubled_between_the_two_threads() -> None:
    seed = 7
    shared, count = Turns(), 400
    runs = [Counting(shared) for _ in range(8)]

    def feed(run: Counting, random_of: random.Random) -> None:
        for index in range(count):
            run.post(2 * index + random_of.randrange(2))
            if random_of.random() < 0.2:
                time.sleep(random_of.random() * 1e-3)

    feeders = [threading.Thread(target=feed, args=(run, random.Random(seed + i))) for i, run in enumerate(runs)]
    for feeder in feeders:
        feeder.start()
    for feeder in feeders:
        feeder.join()
    _wait(lambda: all(len(run.taken) == count for run in runs))
    for run in runs:
        assert [number // 2 for number, _ in run.taken] == list(range(count))
        assert {name for number, name in run.taken if number % 2} == {"own"}
        run.close()


def test_a_run_that_takes_long_holds_nobody_up() -> None:
    shared = Turns()
    slow, quick = Counting(shared, slow_s=1.0), Counting(shared)
    began_s = time.monotonic()
    slow.post(1)
    quick.post(2)
    _wait(lambda: quick.taken)
    assert time.monotonic() - began_s < 0.9
    assert not slow.taken
    for run in (slow, quick):
        run.close()


def test_an_error_found_while_listened_for_is_the_runs_own_affair() -> None:
    shared = Turns()
    run, other = Counting(shared), Counting(shared)
    run.post(-4)
    run.post(6)
    other.post(8)
    _wait(lambda: run.raised and run.taken and other.taken)
    assert [error.args for error in run.raised] == [(-4,)]
    for one in (run, other):
        one.close()


def test_a_resting_run_is_looked_at_though_nobody_calls() -> None:
    run = Counting(Turns(), look_every_s=0.01)
    _wait(lambda: run.looks > 5)
    run.close()
    time.sleep(0.03)
    looks = run.looks
    time.sleep(0.05)
    assert run.looks == looks, "it is over"


def test_where_there_is_no_thread_left_the_run_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, refused = Turns(), list[str]()
    run = Counting(shared, look_every_s=0.02)

    class Scarce(threading.Thread):
        def start(self) -> None:
            if len(refused) < 3:
                refused.append(self.name)
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(turns.threading, "Thread", Scarce)
    run.post(-2)
    run.post(3)
    _wait(lambda: run.taken)
    assert refused == ["own"] * 3
    assert [error.args for error in run.raised] == [(-2,)], "what was found is not forgotten meanwhile"
    monkeypatch.undo()
    run.close()
