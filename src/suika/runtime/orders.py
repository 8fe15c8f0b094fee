"""What a run's owner asks of it, from any thread: orders in turn, and a kill, which comes between. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

Order = tuple[Future[Any], Callable[[], Any]]


class Orders:
    """Orders wait until the run's own thread carries them out, one after the other. `wake` has it look."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.killed = False
        self.taking_back = False  # processes that run already are about to become this run's
        self._wake = wake
        self._waiting: deque[Order] = deque()

    def ask(self, action: Callable[[], Any]) -> Future[Any]:
        """Have `action` carried out on the run's thread, after what was asked for before."""
        future: Future[Any] = Future()
        self._waiting.append((future, action))
        self._wake()
        return future

    def kill(self) -> None:
        self.killed = True
        self._wake()

    # -- on the run's thread ------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def next(self) -> Order:
        return self._waiting.popleft()

    def heed_kill(self, *, runs: bool) -> bool:
        """Whether a kill ends something now: processes, if the job `runs`, or what was asked for before it, and is not
        done any more."""
        if not self.killed or self.taking_back:  # who is not known yet could not be ended
            return False
        self.killed = False
        return self.cancel_all() or runs

    def cancel_all(self) -> bool:
        """Cancel what waits; whether there was anything."""
        found = bool(self._waiting)
        while self._waiting:
            self._waiting.popleft()[0].cancel()
        return found
