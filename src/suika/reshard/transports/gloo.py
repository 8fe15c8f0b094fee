"""A move over an existing gloo process group, whose ranks are the move's participants in cluster order.

Only methods of the group itself are used, so that it need not be registered with `torch.distributed`. Groups outlive no
peer: when its sockets are shut, from either end or by this process's agent, waiting operations raise at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from suika.reshard.transports.base import TransportError, Work


@dataclass(frozen=True)
class _GlooWork:
    work: Any
    buffer: torch.Tensor  # kept alive while gloo reads or writes it
    what: str

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransportError(f"{self.what}: {error}") from error


@dataclass(frozen=True)
class Gloo:
    """`group` is a `dist.ProcessGroup` (or a bare `ProcessGroupGloo`); its own timeout bounds every wait."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._post(self.group.send, peer, tag, buffer, f"send to participant {peer}")

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._post(self.group.recv, peer, tag, buffer, f"receive from participant {peer}")

    def all_gather(self, payload: bytes) -> list[bytes]:
        lengths = self._gather(torch.tensor([len(payload)], dtype=torch.int64))
        longest = max(int(length) for length in lengths)
        if not longest:
            return [b""] * self.size
        padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8)
        everyone = self._gather(padded)
        return [row.numpy().tobytes()[: int(n)] for row, n in zip(everyone, lengths, strict=True)]

    def _post(self, operation: Any, peer: int, tag: int, buffer: torch.Tensor, what: str) -> Work:
        try:
            return _GlooWork(operation([buffer], peer, tag), buffer, what)
        except RuntimeError as error:
            raise TransportError(f"{what}: {error}") from error

    def _gather(self, row: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(row) for _ in range(self.size)]
        try:
            self.group.allgather([rows], [row]).wait()
        except RuntimeError as error:
            raise TransportError(f"all-gather: {error}") from error
        return rows
