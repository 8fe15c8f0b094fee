"""What a move needs of the wire: five calls. tests/reshard/test_transports.py is what every transport must pass."""

from __future__ import annotations

from collections.abc import Mapping
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


class Lent(Protocol):
    """A peer's buffers that this participant can look into. Valid as long as it is held, even if the peer dies."""

    def view(self, name: str) -> torch.Tensor:
        """The buffer, for reading only."""
        ...

    def adopt(self, name: str) -> torch.Tensor:
        """The buffer itself, to go on with once its owner has let go of it: no byte is copied."""
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

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        """Show own buffers to the peers that can map them, and see theirs, by participant.

        All participants call it at the same point. The relation is symmetric; without common memory it is empty. The
        owner must not change a lent buffer before an all-gather has told it that everybody has read it.
        """
        ...
