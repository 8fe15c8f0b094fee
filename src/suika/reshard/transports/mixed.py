"""The best way for each pair of participants: common memory inside a node, a wire between nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from suika.reshard.transports.base import Lent, Transport, Work
from suika.reshard.transports.lines import ApartError, Exchange
from suika.reshard.transports.mapped import Mapped
from suika.reshard.transports.shared import Shared

MakeNear = Callable[[int, Sequence[int], Exchange], Mapped]  # (rank, neighbours, an all-gather) -> their transport


@dataclass(frozen=True)
class Mixed:
    """`wire` reaches everybody; `near` is used for its own peers. Words (gatherings) go over the wire."""

    wire: Transport
    near: Mapped | None
    neighbours: frozenset[int] = field(default=frozenset())

    @staticmethod
    def of(wire: Transport, node: Sequence[int], near: MakeNear = Shared) -> Mixed:
        """`node[i]` is the node of participant i, `near` makes what is used inside one. Where a node's participants
        cannot map each other's memory (another user, another container), they fall back to the wire. All participants
        call it together."""
        me = wire.rank
        neighbours = [i for i, number in enumerate(node) if number == node[me] and i != me]
        try:
            return Mixed(wire, near(me, neighbours, wire.all_gather), frozenset(neighbours))
        except ApartError:
            return Mixed(wire, None)

    @property
    def rank(self) -> int:
        return self.wire.rank

    @property
    def size(self) -> int:
        return self.wire.size

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._way(peer).send(peer, tag, buffer)

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._way(peer).recv(peer, tag, buffer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self.wire.all_gather(payload)

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        return self.near.lend(buffers) if self.near is not None else {}

    def close(self) -> None:
        """Let go of the near lines; the wire belongs to the caller."""
        if self.near is not None:
            self.near.close()

    def _way(self, peer: int) -> Transport:
        return self.near if self.near is not None and peer in self.neighbours else self.wire
