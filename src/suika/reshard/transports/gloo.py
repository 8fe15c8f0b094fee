"""A move over an existing gloo process group, whose ranks are the move's participants in cluster order.

Only methods of the group itself are used, so that it need not be registered with `torch.distributed`. Groups outlive no
peer: when its sockets are shut, from either end or by this process's agent, waiting operations raise at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from suika.reshard.transports.base import Lent, TransportError, Work

_BRIEF = 4096  # bytes of a gathered payload that go with its length in the first collective


@dataclass(frozen=True)
class _GlooWork:
    work: Any
    host: torch.Tensor  # kept alive while gloo reads or writes it
    what: str
    target: torch.Tensor | None = None  # on a device: filled from `host`

    def wait(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise TransportError(f"{self.what}: {error}") from error
        if self.target is not None:
            self.target.copy_(self.host)


@dataclass(frozen=True)
class Gloo:
    """`group` is a `dist.ProcessGroup` (or a bare `ProcessGroupGloo`); its own timeout bounds every wait. Gloo sends
    host memory: buffers on a device go through it."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._post(self.group.send, peer, tag, buffer.cpu(), f"send to participant {peer}")

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        what = f"receive from participant {peer}"
        if buffer.device.type == "cpu":
            return self._post(self.group.recv, peer, tag, buffer, what)
        return self._post(self.group.recv, peer, tag, torch.empty_like(buffer, device="cpu"), what, buffer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """One collective when everybody is brief, two otherwise."""
        whole = len(payload).to_bytes(8, "little") + payload
        heads = self._gather(whole[:_BRIEF])
        lengths = [8 + int.from_bytes(head[:8], "little") for head in heads]
        longest = max(lengths)
        tails = self._gather(whole[_BRIEF:], longest - _BRIEF) if longest > _BRIEF else [b""] * self.size
        return [(head + tail)[8:length] for head, tail, length in zip(heads, tails, lengths, strict=True)]

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        """A wire has no common memory."""
        return {}

    def _post(
        self, operation: Any, peer: int, tag: int, host: torch.Tensor, what: str, target: torch.Tensor | None = None
    ) -> Work:
        try:
            return _GlooWork(operation([host], peer, tag), host, what, target)
        except RuntimeError as error:
            raise TransportError(f"{what}: {error}") from error

    def _gather(self, payload: bytes, size: int = _BRIEF) -> list[bytes]:
        row = torch.frombuffer(bytearray(payload.ljust(size, b"\0")), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        try:
            self.group.allgather([rows], [row]).wait()
        except RuntimeError as error:
            raise TransportError(f"all-gather: {error}") from error
        return [row.numpy().tobytes() for row in rows]
