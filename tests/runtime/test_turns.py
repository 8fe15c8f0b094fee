"""One thread listens for all runs; what takes time has a thread of its own, and nothing is lost between the two."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Any

import pytest

from suika.runtime import turns
from suika.runtime.turns import Turned, Turns, Wait


class Counting(Turned):
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


def test_nothing_is_lost_or_doubled_between_the_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AT_LEAST_EVERY_S", 3600.0)  # no look heals a word that was lost
    seed = 7
    shared, count = Turns(), 400
    runs = [Counting(shared, look_every_s=3600.0) for _ in range(8)]

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


def test_who_comes_after_all_others_have_gone_is_listened_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AT_LEAST_EVERY_S", 0.01)
    shared = Turns()
    Counting(shared).close()
    time.sleep(0.1)
    run = Counting(shared)
    run.post(2)
    _wait(lambda: run.taken)
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


class Chatty(Counting):
    """More has always come while it was listened for."""

    def _listen(self) -> bool:
        if not self._closed:
            self.wake()
        return super()._listen()


def test_those_who_are_always_called_keep_nobody_from_being_looked_at() -> None:
    shared = Turns()
    chatty, quiet = [Chatty(shared) for _ in range(3)], Counting(shared, look_every_s=0.01)
    for one in chatty:
        one.post(2)
    _wait(lambda: quiet.looks > 20)
    for run in (*chatty, quiet):
        run.close()


def test_who_is_called_often_is_not_looked_at_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AT_LEAST_EVERY_S", 3600.0)
    shared, begun, go_on = Turns(), threading.Event(), threading.Event()

    class Held(Counting):
        def _listen(self) -> bool:
            if self.inbox:
                begun.set()
                go_on.wait(10)
            return super()._listen()

    held, run = Held(shared), Counting(shared, look_every_s=3600.0)
    held.post(2)
    assert begun.wait(10)
    looks = run.looks
    for number in range(0, 200, 2):
        run.post(number)
    go_on.set()
    _wait(lambda: len(run.taken) == 100)
    assert run.looks <= looks + 2, "one for all of them, and the first one of all runs"
    for one in (held, run):
        one.close()


def test_nobody_awaits_in_vain_the_end_of_one_whose_thread_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(args.exc_value))

    class Broken(Counting):
        def _carry_out(self) -> bool:
            raise ValueError("a defect")

    run = Broken(Turns())
    run.post(1)
    assert run.await_end(5)
    _wait(lambda: raised)
    assert isinstance(raised[0], ValueError), "and it is not hidden"


class Waiting(Turned):
    """Its own thread waits for each of `wants` to come, one after the other."""

    def __init__(self, shared: Turns, wants: list[int], wait_s: float = 10.0) -> None:
        self.inbox: deque[int] = deque()
        self.heard: list[tuple[int, str]] = []
        self.waited: list[str] = []
        self.stop = False
        self._wants, self._wait_s = wants, wait_s
        super().__init__("own", 5.0, shared)
        self.rest()

    def post(self, number: int) -> None:
        self.inbox.append(number)
        self.wake()

    def check(self) -> None:
        if self.stop:
            raise KeyError("stopped")

    def _listen(self) -> bool:
        if self.waiting is None:
            return not self.inbox
        self.waiting.check()
        while self.inbox:
            self.heard.append((self.inbox.popleft(), threading.current_thread().name))
        return not self.waiting.over() and time.monotonic() < self.waiting.by_s

    def _carry_out(self) -> bool:
        for want in self._wants:
            try:
                self.rest_until(Wait(self._has(want), time.monotonic() + self._wait_s, self.check, "number"))
            except KeyError:
                self.waited.append("stopped")
                return True
            self.waited.append("there" if self._has(want)() else "late")
        return True

    def _has(self, want: int) -> Any:
        return lambda: any(number == want for number, _ in self.heard)


def test_a_thread_that_waits_is_woken_once_for_all_that_comes() -> None:
    run = Waiting(Turns(), [40, 41])
    for number in range(1, 40):
        run.post(number)
    time.sleep(0.05)
    assert run.waited == []
    run.post(40)
    _wait(lambda: run.waited == ["there"])
    run.post(41)
    assert run.await_end(5)
    assert run.waited == ["there", "there"]
    assert [number for number, _ in run.heard] == list(range(1, 42))
    assert {name for _, name in run.heard} == {"jobs"}


def test_a_wait_ends_in_time_though_nobody_calls() -> None:
    began_s = time.monotonic()
    run = Waiting(Turns(), [40], wait_s=0.1)
    run.post(1)
    assert run.await_end(4)
    assert run.waited == ["late"]
    assert time.monotonic() - began_s < 3, "not at the next look at all runs"


def test_what_its_check_finds_is_raised_where_the_run_waits() -> None:
    run = Waiting(Turns(), [40])
    run.post(1)
    _wait(lambda: run.heard)
    run.stop = True
    run.wake()
    assert run.await_end(5)
    assert run.waited == ["stopped"]


def test_no_word_is_lost_while_many_runs_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_AT_LEAST_EVERY_S", 3600.0)
    shared = Turns()
    runs = [Waiting(shared, list(range(100))) for _ in range(8)]

    def feed(run: Waiting) -> None:
        for number in range(100):
            run.post(number)
            if number % 7 == 0:
                time.sleep(1e-4)

    feeders = [threading.Thread(target=feed, args=(run,)) for run in runs]
    for feeder in feeders:
        feeder.start()
    for run in runs:
        assert run.await_end(20)
        assert run.waited == ["there"] * 100
