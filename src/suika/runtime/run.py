"""What a training job's run and a command's have in common: a gang, orders in turn, a kill, an end. No torch."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from suika.runtime.gang import Gang
from suika.runtime.messages import Message
from suika.runtime.orders import Orders
from suika.runtime.turns import Turned, Wait


class Run(Turned):
    """Processes of one job. Commands return futures and are carried out one after the other on the run's own thread."""

    def __init__(self, job_id: str, gang: Gang) -> None:
        super().__init__(f"job-{job_id}", gang.tick_s)
        self.job_id, self.gang = job_id, gang
        self.orders = Orders(lambda: gang.post({}))
        self.closed = False
        gang.on_post, gang.rest = self.wake, self._wait

    def command(self, action: Callable[[], Any]) -> Future[Any]:
        """Have `action` carried out on the run's own thread, after what was asked for before."""
        return self.orders.ask(action)

    def kill(self) -> None:
        """End the job at once, whatever it is doing; what was asked for before and is not begun is not done."""
        self.orders.kill()

    def close(self) -> None:
        """Kill what runs, and listen no more."""
        self.closed = True
        self.kill()
        self.await_end(self.gang.limits.end_s * 2)

    # -- what a kind of run provides ----------------------------------------------------------------------------------

    @abstractmethod
    def check(self) -> None:
        """Raise for what can come between at any time."""

    @abstractmethod
    def _takes_no_time(self, event: Message, awaited: str | None = None) -> bool:
        """Whether the event is no more than a sign of life, or a word like the `awaited` one: all else may need the
        disk, the store, or other processes."""

    # -- the thread of all jobs ---------------------------------------------------------------------------------------

    @property
    def look_by_s(self) -> float:
        by_s, stop_by_s = super().look_by_s, self.gang.stop_by_s
        return min(by_s, stop_by_s) if stop_by_s > time.monotonic() else by_s

    def _listen(self) -> bool:
        if (wait := self.waiting) is not None:
            wait.check()
            alone = self.gang.listen(lambda event: self._takes_no_time(event, wait.say))
            return alone and not wait.over() and time.monotonic() < wait.by_s
        if self.closed or self.orders:
            return False
        self.check()
        return self.gang.listen(self._takes_no_time)

    # -- its own thread -----------------------------------------------------------------------------------------------

    def _wait(self, wait: Wait) -> None:
        self.rest_until(wait)
        if self.gang.has_news:  # it takes time
            self.gang.pump(wait.by_s)
