"""Moves over NCCL, in bounded groups that every participant starts in one order.

NCCL runs what one process posts one after the other, and a send holds the stream until its receive runs: two ranks that
send to each other one by one wait for ever. So operations are collected and started together, all of a tag (a move's
round) as one group, and groups in the order of posting. Rounds are the same everywhere and each holds at most one send
and one receive per participant, so no group waits for a later one.

Words go over `words`, another transport: gatherings of small host data need no device. While a group of this
communicator runs, the same process must not start other collectives on that device unless all ranks start them in the
same order; a trainer's own communicators therefore stay idle during a move.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from suika.reshard.transports.base import Lent, Transport, TransportError, Work

MOST_OPERATIONS = 128  # in one group; far larger ones have been seen to hang
_POLL_S = 0.0005


@dataclass(eq=False)
class _Group:
    """Operations of one tag. `work` is torch's handle once they have been started."""

    tag: int
    operations: list[tuple[bool, int, torch.Tensor]] = field(default_factory=list)  # (sending, peer, buffer)
    work: Any = None


@dataclass(frozen=True)
class _NcclWork:
    transport: Nccl
    group: _Group

    def wait(self) -> None:
        self.transport.finish(self.group)


class Nccl:
    """`group` is a `dist.ProcessGroup` with an NCCL backend whose ranks are the move's participants in cluster order,
    each with a device of its own (NCCL refuses two ranks on one). All of them make their transport together."""

    def __init__(
        self, group: dist.ProcessGroup, words: Transport, device: torch.device, timeout_s: float = 60.0
    ) -> None:
        torch.cuda.set_device(device)
        self._group, self._words, self._device, self._timeout_s = group, words, device, timeout_s
        self._collecting: _Group | None = None
        self._broken = ""
        # The communicator is made now, by everybody: torch leaves it undefined when some ranks' first call is a send.
        group.allreduce([torch.zeros(1, device=device)]).wait()
        torch.cuda.current_stream(device).synchronize()

    @property
    def rank(self) -> int:
        return self._words.rank

    @property
    def size(self) -> int:
        return self._words.size

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._collect(True, peer, tag, buffer)

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._collect(False, peer, tag, buffer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        self._start()
        return self._words.all_gather(payload)

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        """Devices have no common memory that this transport could use."""
        return {}

    def finish(self, group: _Group) -> None:
        """Start what has been collected and wait for `group` on the host. Raises `TransportError`."""
        self._start()
        deadline = time.monotonic() + self._timeout_s
        try:
            while not self._broken and not group.work.is_completed():  # true as well when NCCL has failed
                if time.monotonic() > deadline:
                    self._abort(f"round {group.tag} was not complete after {self._timeout_s:.0f} s")
                time.sleep(_POLL_S)
            if not self._broken and group.work.exception() is not None:
                self._abort(f"NCCL failed in round {group.tag}: {group.work.exception()}")
        except RuntimeError as error:  # torch's binding raises a stored error rather than returning it
            self._abort(str(error))
        if self._broken:
            raise TransportError(self._broken)

    def _collect(self, sending: bool, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        if self._broken:
            raise TransportError(self._broken)
        if self._collecting is None or self._collecting.tag != tag:
            self._start()
            self._collecting = _Group(tag)
        group = self._collecting
        if len(group.operations) == MOST_OPERATIONS:
            raise ValueError(f"more than {MOST_OPERATIONS} operations with tag {tag}: spread them over several tags")
        group.operations.append((sending, peer, buffer))
        return _NcclWork(self, group)

    def _start(self) -> None:
        """Issue the collected group as one NCCL group."""
        group, self._collecting = self._collecting, None
        if group is None:
            return
        try:
            self._group._start_coalescing(self._device)
            for sending, peer, buffer in group.operations:
                post = self._group.send if sending else self._group.recv
                post([buffer], peer, group.tag)
            group.work = self._group._end_coalescing(self._device)
        except RuntimeError as error:
            self._abort(str(error))
            raise TransportError(self._broken) from error

    def _abort(self, why: str) -> None:
        """NCCL's kernels would wait for ever: end them. The group cannot be used again."""
        self._broken = why
        self._group._get_backend(self._device).abort()
