"""What a move needs of the wire: four calls. tests/reshard/test_transports.py is what every transport must pass."""

from __future__ import annotations

from typing import Protocol

import torch


class TransportError(RuntimeError):
    """A peer or link is gone. The move did not happen; old buffers are untouched."""


class Work(Protocol):
    """One posted operation."""

    def wait(self) -> None:
        """Block until the operation is done; raises `TransportError` when the peer or the link is gone.

        After it a received buffer is filled, a sent one may be changed.
        """
        ...


class Transport(Protocol):
    """Participant `rank` of `size`; used from one thread. Buffers are 1-D contiguous uint8.

    Messages from one participant to another are matched by (tag, order of posting). Posting never blocks on the peer.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        """Post a send; `buffer` must stay unchanged until the work is waited for."""
        ...

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        """Post a receive of exactly `buffer.numel()` bytes."""
        ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload (lengths may differ), by rank. All participants call it at the same point."""
        ...
