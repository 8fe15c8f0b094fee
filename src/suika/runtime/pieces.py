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
from suika.core.tensors import logical_tensors
from suika.reshard.regions import Box, refine
from suika.reshard.state import (
    ITEM_BYTES,
    JobShape,
    Region,
    StateKey,
    optimizer_kinds,
    rank_regions,
    weight_dtype,
)

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
    for part, owners in _parts(shape, plan):
        rank, region = _least_loaded(owners, load)
        load[rank] += part.numel
        found[rank].append(Piece(part, region))
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
    load = [0] * num_ranks
    for part, owners in _parts(shape, plan):
        first, region = _least_loaded(owners, load)
        load[first] += part.numel
        elsewhere = [owner for owner in owners if plan.devices[owner[0]].node != plan.devices[first].node]
        (shared if elsewhere else alone)[first].append(Piece(part, region))
        if elsewhere:
            second, region = _least_loaded(elsewhere, load)
            load[second] += part.numel
            shared[second].append(Piece(part, region))
    width = {kind: ITEM_BYTES[dtype] for kind, dtype in dtypes(shape).items()}
    return tuple(
        Share((*mine, *ours), len(mine), tuple(p.box.numel * width[p.region.key.kind] for p in (*mine, *ours)))
        for mine, ours in zip(alone, shared, strict=True)
    )


def own_bytes(shape: JobShape, plan: Plan) -> dict[str, tuple[int, int]]:
    """Node of the plan -> what one set of copies takes on it of its own ranks' shares, and how much of that lies on no
    other node."""
    total = dict.fromkeys((device.node for device in plan.devices), (0, 0))
    for device, share in zip(plan.devices, shares(shape, plan), strict=True):
        own, alone = total[device.node]
        total[device.node] = own + share.num_bytes, alone + share.alone_bytes
    return total


def is_whole(shape: JobShape, plan: Plan, own: Iterable[int], copied: Iterable[int]) -> bool:
    """Whether the shares of the ranks `own` and the copies of those of `copied` hold all of the state together."""
    everyone = shares(shape, plan)
    there = {piece.place for rank in own for piece in everyone[rank].pieces}
    there |= {piece.place for rank in copied for piece in everyone[rank].pieces[: everyone[rank].num_alone]}
    return all(piece.place in there for share in everyone for piece in share.pieces)


Owner = tuple[int, Region]


def _least_loaded(owners: Iterable[Owner], load: list[int]) -> Owner:
    return min(owners, key=lambda owner: (load[owner[0]], owner[0]))


def _parts(shape: JobShape, plan: Plan) -> Iterator[tuple[Box, list[Owner]]]:
    """The state in boxes that each owner holds whole or not at all, with their owners (rank, region)."""
    holders: dict[StateKey, dict[Box, list[Owner]]] = {}
    for rank in range(plan.layout.num_ranks):
        for region in plan_regions(shape, plan, rank):
            holders.setdefault(region.key, {}).setdefault(region.box, []).append((rank, region))
    numel = {tensor.name: tensor.numel for tensor in logical_tensors(shape.model, shape.sequence_length)}
    for key, boxes in holders.items():
        whole = numel[key.tensor]
        # Replicas cut differently (ZeRO slices of unequal shards) overlap in part: then cut along every edge.
        parts = list(boxes) if sum(box.numel for box in boxes) == whole else refine(boxes)
        assert sum(part.numel for part in parts) == whole, f"{key} is not covered by {plan.layout}"
        for part in parts:
            yield part, [owner for box, owners in boxes.items() if box.contains(part) for owner in owners]
