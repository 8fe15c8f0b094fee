"""The live driver: one reconcile loop in two halves. It first takes in what happened, then acts on it.

Only the loop's thread changes anything, but for a move's commit (a compare-and-set in the store). Requests of users and
reports of jobs go through one inbox; those that come in during a cycle are decided together in the next.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from suika.control.act import Actor, Launcher
from suika.control.decider import Decide, decide_here
from suika.control.drains import Drains
from suika.control.final import delivering
from suika.control.observe import Observer
from suika.control.state import Clock, Run, State, Watch
from suika.control.store import StaleWriteError, Store, StoreAwayError
from suika.control.views import Pricing
from suika.core.cluster import Cluster
from suika.core.policy import Policy
from suika.runtime.events import JobEvent, Sampled, StepDone

T = TypeVar("T")
TICK_S = 0.2  # the longest that an expired hold goes unnoticed
LONG_CYCLE_S = 0.1  # a cycle that takes longer is followed by a rest as long
AWAY_S = 1.0  # between attempts to go on with a store that cannot be written
CALL_WAIT_S = 30.0
DEVICE_HOLD_S = 30.0  # a device whose process died is set aside for so long


class Controller:
    """`turn` is one round of the loop (tests call it with their own clock); `start` runs rounds in a thread."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        policy: Policy,
        pricing: Pricing,
        launcher: Launcher,
        clock: Clock,
        device_hold_s: float = DEVICE_HOLD_S,
        listener: Callable[[JobEvent], object] | None = None,
        decide: Decide | None = None,
    ) -> None:
        """`listener` hears every report of every job first, on the job's own thread. `decide` asks `policy`; by
        default on the loop's thread."""
        self.state = State(cluster, store, clock)
        self.pricing, self.policy = pricing, policy
        self._inbox: queue.SimpleQueue[JobEvent | Callable[[], None]] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(4, "control")
        self._thread: threading.Thread | None = None
        self._listener = listener
        self._stopping = False
        self._last_fault = ""
        self._decide_at_s = 0.0
        self._away = False  # the store, at the last fault
        self._kept: list[JobEvent | Callable[[], None]] = []
        self._turned_s = time.monotonic()
        self._round_s, self._next_round_s = policy.round_s, 0.0
        self.observer = Observer(self.state, device_hold_s, self.retire, delivering(self._pool.submit, self.post))
        self.actor = Actor(
            self.state,
            pricing,
            decide or decide_here(policy),
            launcher,
            on_event=self._hear,
            post=self.post,
            background=self._pool.submit,
            on_failed_move=self.observer.move_failed,
        )
        self.drains = Drains(self.state, self.actor.stop)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def turn(self, wait_s: float = 0.0) -> None:
        """Take in everything that has arrived (waiting up to `wait_s` for a first message), then act."""
        self._turned_s, self._away = time.monotonic(), False
        messages = [*self._kept, *self._arrived(wait_s)]
        self._kept = []
        for index, message in enumerate(messages):
            if not self._guarded(message if callable(message) else partial(self.observer.see, message)) and self._away:
                # What could not be written down must not be lost; but the next step will be reported like the last.
                self._kept = [m for m in messages[index:] if not isinstance(m, StepDone | Sampled)]
                break
        self._guarded(self._expire_holds)
        self._guarded(self.drains.look)
        if self.state.changed and self.state.clock() >= self._decide_at_s:
            self._decide()
        if not self._guarded(self.actor.dispatch):
            self.state.changed = True

    def _decide(self) -> None:
        """One cycle. A long one is not followed by another at once, however much goes on: half of the time is for what
        jobs report and users ask."""
        self.state.changed = False
        began_s = time.monotonic()
        if not self._guarded(self.actor.decide):
            self.state.changed = True  # tried again in the next round
        lasted_s = time.monotonic() - began_s
        self._decide_at_s = self.state.clock() + lasted_s if lasted_s > LONG_CYCLE_S else 0.0

    def _arrived(self, wait_s: float) -> list[JobEvent | Callable[[], None]]:
        messages = []
        try:
            messages.append(self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait())
            while True:
                messages.append(self._inbox.get_nowait())
        except queue.Empty:
            return messages

    def _guarded(self, action: Callable[[], Any]) -> bool:
        """Whether `action` went well. A fault of ours in one message or cycle must not end the loop for all jobs: it
        is logged for all to see, once while it lasts."""
        try:
            action()
        except Exception as error:
            self._away = isinstance(error, StoreAwayError)
            fault = f"{type(error).__name__}: {error}"
            if fault != self._last_fault:
                traceback.print_exc(file=sys.stderr)
                with suppress(StoreAwayError):
                    self.state.log("controller-fault", error=fault)
            self._last_fault = fault
            return False
        return True

    def _expire_holds(self) -> None:
        """Devices that were set aside come back; jobs left alone after a failed move may be decided about again; a
        policy that works in rounds is asked again."""
        state, now = self.state, self.state.clock()
        if self._round_s and now >= self._next_round_s:
            self._next_round_s = now + self._round_s
            state.changed = True
        returned = [device for device, until_s in state.down.items() if until_s <= now]
        if returned:
            with state.store.together():
                for device in returned:
                    state.log("device-returned", device=str(device))
            for device in returned:
                del state.down[device]
            state.changed = True
        for watch in state.watches.values():
            if watch.hold_until_s and watch.hold_until_s <= now:
                watch.hold_until_s = 0.0
                state.changed = True

    def _hear(self, report: JobEvent) -> None:
        if self._listener is not None:
            self._listener(report)
        self._inbox.put(report)

    @property
    def stands_s(self) -> float:
        """Real seconds since the loop last began a round."""
        return time.monotonic() - self._turned_s

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="controller", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stopping:
            self.turn(TICK_S)
            if self._away:
                time.sleep(AWAY_S)

    def call(self, change: Callable[[], T]) -> T:
        """Run `change` on the loop's thread, between cycles; its result, or what it raises."""
        if self._thread is None or threading.current_thread() is self._thread:
            return change()
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(self._retried(change))
            except Exception as error:
                done.set_exception(error)

        self._inbox.put(run)
        return done.result(CALL_WAIT_S)

    @staticmethod
    def _retried(change: Callable[[], T]) -> T:
        """A move's commit on another thread may come between reading a record and writing it: read it again."""
        try:
            return change()
        except StaleWriteError:
            return change()

    def post(self, message: JobEvent | Callable[[], None]) -> None:
        """Have the loop take in a report, or run a call, in its next round."""
        self._inbox.put(message)

    def retire(self, watch: Watch) -> None:
        """The job will not run again: let go of what ran it, off the loop."""
        if watch.run is not None:
            self._pool.submit(watch.run.close)
            watch.run = None

    def close(self, leave_jobs: bool = False) -> None:
        """End the loop, then every job's processes, unless they are left to the next controller. Returns when they are
        gone."""
        self._stopping = True
        if self._thread is not None:
            self._thread.join(CALL_WAIT_S)
        runs: list[Run] = [watch.run for watch in self.state.watches.values() if watch.run is not None]
        for closing in [self._pool.submit(run.close) for run in runs if not leave_jobs]:
            closing.result(CALL_WAIT_S)
        self._pool.shutdown(cancel_futures=True)
