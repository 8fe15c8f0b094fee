"""Moves between participants that can look into each other's memory: whole buffers change hands, the rest is read.

Nothing is sent. A needer copies from the owner's live buffer straight into its own, in whatever cut, and compares what
it wrote. Where a whole buffer leaves its owner and is wanted as it is, the needer adopts it: the same pages, no byte
copied. Owners leave their buffers alone until the move's verdict, which is everybody's acknowledgement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from suika.reshard.bits import copied
from suika.reshard.buffers import Make, Part, Side, allocate, boxes
from suika.reshard.modes import adoptions
from suika.reshard.moveplan import MovePlan
from suika.reshard.rounds import Stream
from suika.reshard.transports.base import Lent, Transport


@dataclass
class Nearby:
    """What one participant has of its neighbours during a move. `buffers` are its own new ones."""

    plan: MovePlan
    me: int
    buffers: dict[str, torch.Tensor]
    adopted: frozenset[str]
    neighbours: frozenset[int]
    sides: dict[tuple[int, int], Side]  # (hop, neighbour) -> what is read in that hop: old buffers, then new ones

    @staticmethod
    def prepare(
        plan: MovePlan, me: int, old: Mapping[str, torch.Tensor], transport: Transport, make: Make | None = None
    ) -> Nearby:
        """Allocate the new buffers and map what will be read, while training goes on. All participants call it.

        `make` gives memory that the neighbours can map. Raises `TransportError`, and MemoryError when there is none.
        """
        lent = transport.lend(old)
        mine = adoptions(plan, {me, *lent})[me]
        adopted = {name: lent[owner].adopt(there) for name, (owner, there) in mine.items()}
        try:
            buffers = allocate(plan, me, old, make, adopted)
        except MemoryError:
            if plan.forwards:
                transport.lend({})  # the others must not wait for this participant
            raise
        again = transport.lend(buffers) if plan.forwards else {}
        sides = {(0, peer): Side(_Mapped(peers), plan.old.regions(peer)) for peer, peers in lent.items()}
        sides |= {(1, peer): Side(_Mapped(peers), plan.new.regions(peer)) for peer, peers in again.items()}
        near = Nearby(plan, me, buffers, frozenset(adopted), frozenset(lent), sides)
        near._map()
        return near

    def reads(self, stream: Stream) -> bool:
        """Whether the needer reads this stream from the owner's memory: nothing is sent."""
        return {stream.src, stream.dst} <= self.neighbours | {self.me}

    def sees_all(self, holders: Iterable[int]) -> bool:
        """Whether this participant, one of `holders`, can look into the memory of all others."""
        return self.neighbours.union((self.me,)).issuperset(holders)

    def proven(self, holders: Iterable[int], needer: int) -> bool:
        """Whether `needer`, a neighbour or this participant, compares with an owner's memory instead of hashing."""
        together = self.neighbours | {self.me}
        return needer in together and not together.isdisjoint(holders)

    def read(self, hop: int, owner: int, wanted: Iterable[Part], target: Side) -> tuple[int, int, str]:
        """Copy one message from its owner's memory; (bytes copied, bytes adopted, what went wrong or nothing)."""
        source, num_copied, num_adopted = self.sides[hop, owner], 0, 0
        for _, _, _, cell, low, high in wanted:
            if target.buffer_of(cell) in self.adopted:
                num_adopted += high - low
                continue
            there, here = source.view(cell), target.view(cell)
            for box in boxes(cell, low, high):
                want, got = there[box.slices], here[box.slices]
                if not copied(got, want):
                    return num_copied, num_adopted, f"{cell.key.kind} of {cell.key.tensor}{cell.box} was copied wrongly"
            num_copied += high - low
        return num_copied, num_adopted, ""

    def _map(self) -> None:
        """Map now what will be read or compared. A neighbour without memory shows nothing: `Mover.agree` will tell."""
        for stream in self.plan.streams:
            if stream.dst == self.me and self.reads(stream):
                for segment in stream.segments:
                    for cell in self.plan.groups[segment.group].cells:
                        with suppress(KeyError):
                            self.sides[stream.hop, stream.src].view(cell)
        for group, demand in zip(self.plan.groups, self.plan.demands, strict=True):
            if self.me in demand.holders and len(demand.holders) > 1 and self.sees_all(demand.holders):
                other = demand.holders[(demand.holders.index(self.me) + 1) % len(demand.holders)]
                for cell in group.cells:
                    self.sides[0, other].view(cell)  # a replica that is compared


class _Mapped(dict[str, torch.Tensor]):
    """A neighbour's buffers, mapped when first looked at."""

    def __init__(self, lent: Lent) -> None:
        super().__init__()
        self._lent = lent

    def __missing__(self, name: str) -> torch.Tensor:
        self[name] = self._lent.view(name)
        return self[name]
