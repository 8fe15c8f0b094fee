"""Whose turn it is: one thread listens for all runs that have nothing to carry out. No torch.

A controller has a run for each of a thousand jobs, and what most of them hear is that one more step is done. A thread
each would be woken for each word, and hundreds that want the interpreter at once keep the machine busy with waking them
alone. So a run rests with all the others until something comes that takes time: an order, a death, a snapshot to put on
record. For that it has a thread of its own, and rests again afterwards. Where that thread waits for words of processes,
as through most of a start, the run rests too, and the thread is woken once they are all there.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

_AT_LEAST_EVERY_S = 1.0  # though nobody rests


@dataclass(frozen=True)
class Wait:
    """What a run's own thread waits for: until `over`, or `by_s` of the monotonic clock, or `check` raises."""

    over: Callable[[], bool]
    by_s: float
    check: Callable[[], None]
    say: str  # the word that it waits for, which takes no time to hear


class Turned(ABC):
    """Either rests, and is looked at by the thread of all, or has a thread of its own: never both, so that what is the
    run's needs no lock."""

    def __init__(self, name: str, look_every_s: float, turns: Turns | None = None) -> None:
        self.look_every_s = look_every_s
        self.resting = True
        self.waiting: Wait | None = None  # its own thread waits meanwhile
        self._name = name
        self._turns = turns or EVERYONES
        self._found: BaseException | None = None  # by the thread of all: what the run's own thread has to deal with
        self._over = threading.Event()
        self._woken = threading.Event()

    def rest(self) -> None:
        """From now on it is listened for: the last thing its maker does."""
        self._turns.add(self)

    def wake(self) -> None:
        """From any thread: there is something to hear or to do."""
        self._turns.call(self)

    def await_end(self, wait_s: float) -> bool:
        """Whether the run was over within so long."""
        return self._over.wait(wait_s)

    # -- what a kind of run provides ----------------------------------------------------------------------------------

    @property
    def look_by_s(self) -> float:
        """When a resting run is to be looked at again, of the monotonic clock, though nobody calls."""
        return self.waiting.by_s if self.waiting is not None else math.inf

    @abstractmethod
    def _listen(self) -> bool:
        """Take in what has come and takes no time, without waiting; False: there is more to do than that, or what its
        own thread is `waiting` for is there. What it raises is raised again by `_hand_back`, on that thread."""

    @abstractmethod
    def _carry_out(self) -> bool:
        """On a thread of its own: do all there is to do. Returns whether the run is over for good."""

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def rest_until(self, wait: Wait) -> None:
        """On the run's own thread: rest until `wait` is over or something has come that takes time. Raises what was
        found meanwhile."""
        self.waiting = wait
        self._woken.clear()
        self.resting = True
        self.wake()
        self._woken.wait()
        self.waiting = None
        self._hand_back()

    def _hand_back(self) -> None:
        """Raise what was found while the run was listened for."""
        found, self._found = self._found, None
        if found is not None:
            raise found

    def look(self) -> None:
        """On the thread of all."""
        try:
            if self._found is None and self._listen():
                return
        except BaseException as error:
            self._found = error
        self.resting = False
        if self.waiting is not None:
            self._woken.set()
            return
        try:
            threading.Thread(target=self._busy, name=self._name, daemon=True).start()
        except RuntimeError:  # the machine has no thread left: it is looked at again
            self.resting = True

    def _busy(self) -> None:
        over = True  # also if it raises, which is a defect: nobody awaits its end in vain
        try:
            over = self._carry_out()
        finally:
            if over:
                self._turns.remove(self)
                self._over.set()
            else:
                self.resting = True
                self.wake()  # for what has come meanwhile


class Turns:
    """The thread of all."""

    def __init__(self) -> None:
        self._runs: set[Turned] = set()
        self._called: OrderedDict[Turned, None] = OrderedDict()  # each once: one look takes in all that has come
        self._bell = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, run: Turned) -> None:
        with self._lock:
            self._runs.add(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._live, name="jobs", daemon=True)
                self._thread.start()

    def remove(self, run: Turned) -> None:
        with self._lock:
            self._runs.discard(run)

    def call(self, run: Turned) -> None:
        """Have it looked at soon, unless it has a thread of its own."""
        if run.resting:
            self._called[run] = None
            if not self._bell.is_set():  # one ring for all that come while nobody listens
                self._bell.set()

    def _live(self) -> None:
        look_s = time.monotonic()
        while True:
            self._bell.wait(max(look_s - time.monotonic(), 0.0))
            self._bell.clear()
            for _ in range(len(self._called)):  # who is called meanwhile comes after those whose time is up
                run, _ = self._called.popitem(last=False)
                look_s = min(look_s, self._look(run))
            if time.monotonic() >= look_s:
                with self._lock:
                    runs = list(self._runs)
                look_s = min([time.monotonic() + _AT_LEAST_EVERY_S, *map(self._look, runs)])

    @staticmethod
    def _look(run: Turned) -> float:
        """Returns when to look again."""
        if run.resting:
            run.look()
        return min(time.monotonic() + run.look_every_s, run.look_by_s) if run.resting else math.inf


EVERYONES = Turns()
