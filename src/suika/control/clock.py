"""The controller's clock: seconds since the epoch that never go back.

Somebody who sets the machine's clock back by an hour must not keep devices that were set aside away for an hour, nor
make a job's run last less than nothing. So time passes as the steady clock has it (also while the machine sleeps); a
step forward is followed at once, after a step back time passes a little slower until the machine's clock has caught up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SLOWER = 0.05  # of a second per second, as long as the machine's clock is behind


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class SteadyClock:
    """Call it for the time, from any thread. `wall` gives seconds since the epoch, `steady` since whenever."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _since_boot_s) -> None:
        self._wall, self._steady = wall, steady
        self._lock = threading.Lock()
        self._now_s, self._seen_s = wall(), steady()

    def __call__(self) -> float:
        with self._lock:
            seen_s, wall_s = self._steady(), self._wall()
            passed_s, self._seen_s = seen_s - self._seen_s, seen_s
            pace = 1.0 - _SLOWER if self._now_s + passed_s > wall_s else 1.0
            self._now_s = max(self._now_s + passed_s * pace, wall_s)
            return self._now_s
