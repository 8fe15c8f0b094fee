"""Who saves what: the whole state of a plan cut into pieces, for snapshots on disk and for copies in memory. No torch.

Pure functions of (job shape, plan): every rank, and whoever watches them, derives the same without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from suika.core.plan import Plan
from suika.reshard.regions import Box
from suika.reshard.state import (
    ITEM_BYTES,
    JobShape,
    Region,
    StateKey,
    optimizer_kinds,
    rank_regions,
    weight_dtype,
)
from suika.runtime.parts import Part, Parts, parts_of

_ALIGNMENT = 64


class Piece(NamedTuple):
    """A box that one rank saves, out of a region that it holds."""

    box: Box
    region: Region

    @property
    def name(self) -> str:
        return chunk_name(self.region.key)

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        """Which part of the logical state it is, whoever holds it."""
        return self.name, self.box.starts


def chunk_name(key: StateKey) -> str:
    return f"{key.kind}/{key.tensor}"


def plan_regions(shape: JobShape, plan: Plan, rank: int) -> tuple[Region, ...]:
    return rank_regions(shape.model, plan.layout, shape.sequence_length, shape.precision, rank, plan.order)


def dtypes(shape: JobShape) -> dict[str, str]:
    """Name of the dtype of each kind of state."""
    return {"weight": weight_dtype(shape.precision), **optimizer_kinds(shape.precision)}


@lru_cache(maxsize=8)
def pieces(shape: JobShape, plan: Plan) -> tuple[tuple[Piece, ...], ...]:
    """What each rank writes to disk: every element of the state exactly once, by the owner with the least so far."""
    found: list[list[Piece]] = [[] for _ in range(plan.layout.num_ranks)]
    load = [0] * plan.layout.num_ranks
    for some in parts_of(shape, plan):
        for part in some.parts:
            rank = _least_loaded(part.owners, load)
            load[rank] += part.numel
            found[rank].append(Piece(part.box, some.region(part, rank)))
    return tuple(map(tuple, found))


@dataclass(frozen=True)
class Share:
    """What one rank gives for a copy in memory, laid out one piece after the other. The first `num_alone` pieces have
    no owner on any other node, so that their bytes, [0, `alone_bytes`), are sent on to one."""

    pieces: tuple[Piece, ...]
    num_alone: int
    num_bytes_of: tuple[int, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each piece begins, and where the next one would."""
        steps = (-(-n // _ALIGNMENT) * _ALIGNMENT for n in self.num_bytes_of)
        return tuple(accumulate(steps, initial=0))

    @property
    def num_bytes(self) -> int:
        """At least one line, even where replicas outnumber pieces: what is empty cannot be mapped."""
        return max(self.offsets[-1], _ALIGNMENT)

    @property
    def alone_bytes(self) -> int:
        return self.offsets[self.num_alone]


@lru_cache(maxsize=4)
def shares(shape: JobShape, plan: Plan) -> tuple[Share, ...]:
    """Each rank's share of a copy in memory. With what is sent on every element lies on two nodes: on those of two of
    its owners, where replicas live on several nodes, else on its owner's node and on the one that keeps its copies."""
    num_ranks = plan.layout.num_ranks
    alone: list[list[Piece]] = [[] for _ in range(num_ranks)]
    shared: list[list[Piece]] = [[] for _ in range(num_ranks)]
    for some, given in _given(shape, plan):
        for part, first, second in given:
            (alone if second is None else shared)[first].append(Piece(part.box, some.region(part, first)))
            if second is not None:
                shared[second].append(Piece(part.box, some.region(part, second)))
    widths = _widths(shape)
    return tuple(
        Share((*mine, *ours), len(mine), tuple(p.box.numel * widths[p.region.key.kind] for p in (*mine, *ours)))
        for mine, ours in zip(alone, shared, strict=True)
    )


def own_bytes(shape: JobShape, plan: Plan) -> dict[str, tuple[int, int]]:
    """Node of the plan -> what one set of copies takes on it of its own ranks' shares, and how much of that lies on no
    other node. The sum over `shares`, whose pieces are not made for it."""
    lines, alone, widths = [0] * plan.layout.num_ranks, [0] * plan.layout.num_ranks, _widths(shape)
    for some, given in _given(shape, plan):
        width = widths[some.key.kind]
        for part, first, second in given:
            num = -(-part.numel * width // _ALIGNMENT)
            lines[first] += num
            if second is None:
                alone[first] += num
            else:
                lines[second] += num
    total = dict.fromkeys((device.node for device in plan.devices), (0, 0))
    for rank, device in enumerate(plan.devices):
        own_bytes, alone_bytes = total[device.node]
        own_bytes += max(lines[rank], 1) * _ALIGNMENT
        total[device.node] = own_bytes, alone_bytes + alone[rank] * _ALIGNMENT
    return total


def is_whole(shape: JobShape, plan: Plan, own: Iterable[int], copied: Iterable[int]) -> bool:
    """Whether the shares of the ranks `own` and the copies of those of `copied` hold all of the state together."""
    there, sent_on = set(own), set(copied)
    return all(
        first in there or (first in sent_on if second is None else second in there)
        for _, given in _given(shape, plan)
        for _, first, second in given
    )


Given = tuple[Part, int, int | None]  # by a rank, and by one on another node if replicas live there


def _given(shape: JobShape, plan: Plan) -> Iterator[tuple[Parts, list[Given]]]:
    """Who gives what of each tensor for a copy in memory."""
    nodes = [device.node for device in plan.devices]
    load = [0] * plan.layout.num_ranks
    for some in parts_of(shape, plan):
        given: list[Given] = []
        for part in some.parts:
            is_slice = len(part.owners) == 1  # most are: there is nothing to choose
            first, second = (next(iter(part.owners)), None) if is_slice else _two_of(part.owners, load, nodes)
            load[first] += part.numel
            if second is not None:
                load[second] += part.numel
            given.append((part, first, second))
        yield some, given


def _two_of(owners: Iterable[int], load: list[int], nodes: list[str]) -> tuple[int, int | None]:
    """The owner with the least load so far, and of those on other nodes the one with the least."""
    first = _least_loaded(owners, load)
    elsewhere = [rank for rank in owners if nodes[rank] != nodes[first]]
    return first, _least_loaded(elsewhere, load) if elsewhere else None


def _least_loaded(ranks: Iterable[int], load: list[int]) -> int:
    """`ranks` ascend: of those that have the same load it is the first one."""
    return min(ranks, key=load.__getitem__)


def _widths(shape: JobShape) -> dict[str, int]:
    """Bytes of an element of each kind of state."""
    return {kind: ITEM_BYTES[dtype] for kind, dtype in dtypes(shape).items()}
