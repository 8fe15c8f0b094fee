"""The agenda: a heap of events to come."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

# Kinds of events, in the order in which those of one instant are applied.
END, SETTLED, RELEASED, REPAIRED, HEALED, FAILED, SLOWED, ARRIVED, ROUND = range(9)


class Agenda:
    """Events by time, then kind, then as they were entered."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, object]] = []
        self._sequence = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, at_s: float, kind: int, what: object) -> None:
        heapq.heappush(self._heap, (at_s, kind, next(self._sequence), what))

    @property
    def next_s(self) -> float:
        """When the next event is due; there must be one."""
        return self._heap[0][0]

    def is_due(self, now_s: float) -> bool:
        return bool(self._heap) and self._heap[0][0] <= now_s

    def take(self, now_s: float) -> Iterator[tuple[int, object]]:
        """(kind, what it is about) of all that is due, what is entered meanwhile included."""
        while self._heap and self._heap[0][0] <= now_s:
            _, kind, _, what = heapq.heappop(self._heap)
            yield kind, what
