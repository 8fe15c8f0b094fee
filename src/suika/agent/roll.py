"""A roll call: the controller asks for signs of life of many processes at once, and gets one answer for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

WITHIN_S = 1.0  # who has not answered by then answers by himself


class RollCall:
    """`tell` is called with those who have answered: when all have, or after `WITHIN_S`. Safe from any thread."""

    def __init__(self, tell: Callable[[list[str]], None], within_s: float = WITHIN_S) -> None:
        self._tell, self._within_s = tell, within_s
        self._lock = threading.Lock()
        self._called: set[str] = set()
        self._here: list[str] = []
        self._end: threading.Timer | None = None

    def call(self, processes: Iterable[str]) -> None:
        with self._lock:
            self._called.update(processes)
            if self._end is None and self._called:
                self._end = threading.Timer(self._within_s, self._close)
                self._end.daemon = True
                self._end.start()

    def answered(self, process: str) -> bool:
        """Whether it was called; then its answer need not be passed on."""
        with self._lock:
            if process not in self._called:
                return False
            self._called.remove(process)
            self._here.append(process)
            complete = not self._called
        if complete:
            self._close()
        return True

    def _close(self) -> None:
        with self._lock:
            if self._end is not None:
                self._end.cancel()
            here, self._here, self._end = self._here, [], None
            self._called.clear()
        if here:
            self._tell(here)
