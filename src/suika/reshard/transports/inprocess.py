"""Participants as threads of one process: for tests, examples and people who reshard on one host."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from suika.reshard.transports.base import Lent, TransportError, Work


@dataclass
class _Slot:
    """A message on its way: filled by whoever comes second."""

    buffer: torch.Tensor
    done: threading.Event = field(default_factory=threading.Event)
    error: str = ""


class Hub:
    """What the participants share. `break_link` makes every present and later operation fail, as a dead peer would."""

    def __init__(self, size: int, timeout_s: float = 60.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self._lock = threading.Lock()
        self._sends: dict[tuple[int, int, int], deque[_Slot]] = defaultdict(deque)
        self._recvs: dict[tuple[int, int, int], deque[_Slot]] = defaultdict(deque)
        self._barrier = threading.Barrier(size)
        self._gathered: list[Any] = [None] * size
        self._broken = ""

    def transports(self) -> list[InProcess]:
        return [InProcess(self, rank) for rank in range(self.size)]

    def break_link(self, reason: str = "link cut") -> None:
        with self._lock:
            self._broken = reason
            waiting = [slot for queues in (self._sends, self._recvs) for queue in queues.values() for slot in queue]
        for slot in waiting:
            slot.error = reason
            slot.done.set()
        self._barrier.abort()

    def unmatched(self) -> int:
        """Operations that were posted and found no partner."""
        with self._lock:
            return sum(map(len, self._sends.values())) + sum(map(len, self._recvs.values()))

    def post(self, key: tuple[int, int, int], buffer: torch.Tensor, sending: bool) -> _Slot:
        """Pair with the first waiting counterpart, or wait for one. The copy happens here, in the second comer."""
        mine = _Slot(buffer)
        with self._lock:
            if self._broken:
                raise TransportError(self._broken)
            others = (self._recvs if sending else self._sends)[key]
            if not others:
                (self._sends if sending else self._recvs)[key].append(mine)
                return mine
            other = others.popleft()
        source, target = (mine, other) if sending else (other, mine)
        if source.buffer.numel() != target.buffer.numel():
            problem = f"sent {source.buffer.numel()} bytes, expected {target.buffer.numel()}"
            source.error = target.error = problem
        else:
            target.buffer.copy_(source.buffer)
        mine.done.set()
        other.done.set()
        return mine

    def gather(self, rank: int, thing: Any) -> list[Any]:
        """What each participant brought."""
        try:
            self._gathered[rank] = thing
            self._barrier.wait(self.timeout_s)
            everyone = list(self._gathered)
            self._barrier.wait(self.timeout_s)
        except threading.BrokenBarrierError:
            raise TransportError(self._broken or "a participant did not come to the gathering") from None
        return everyone


@dataclass(frozen=True)
class _SlotWork:
    slot: _Slot
    timeout_s: float

    def wait(self) -> None:
        if not self.slot.done.wait(self.timeout_s):
            raise TransportError(f"no partner within {self.timeout_s} s")
        if self.slot.error:
            raise TransportError(self.slot.error)


@dataclass(frozen=True)
class _Same:
    """A peer's buffers in the same process: they are the buffers."""

    buffers: Mapping[str, torch.Tensor]

    def view(self, name: str) -> torch.Tensor:
        return self.buffers[name]

    def adopt(self, name: str) -> torch.Tensor:
        return self.buffers[name]


@dataclass(frozen=True)
class InProcess:
    """One participant's end of a `Hub`."""

    hub: Hub
    rank: int

    @property
    def size(self) -> int:
        return self.hub.size

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return _SlotWork(self.hub.post((self.rank, peer, tag), buffer, True), self.hub.timeout_s)

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return _SlotWork(self.hub.post((peer, self.rank, tag), buffer, False), self.hub.timeout_s)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self.hub.gather(self.rank, payload)

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        everyone = self.hub.gather(self.rank, dict(buffers))
        return {peer: _Same(lent) for peer, lent in enumerate(everyone) if peer != self.rank}
