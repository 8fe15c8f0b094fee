"""Where one layout cuts each tensor: intervals, and the places that hold them.

A tensor-parallel rank's shard of a matrix is a window of its columns (all of them where rows are cut); what a ZeRO
slice holds of the shard is a flat range of that window. So everything is an `Interval`, and within one layout only
intervals of the same window can overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from suika.core.layout import Layout
from suika.core.tensors import LogicalTensor, logical_tensors
from suika.reshard.state import Bucket, JobShape, bucket_owner

WEIGHT, OPTIMIZER = 0, 1  # kinds that are cut alike: masters and moments share their geometry
Holders = frozenset[int]  # places: (stage * tp + tp rank) * replicas + replica
Found = dict[tuple[str, int], list["Interval"]]  # by (tensor, WEIGHT or OPTIMIZER)


class Interval(NamedTuple):
    """Elements [start, stop), row-major, of the columns [left, right) of a tensor, and the places that hold them."""

    left: int
    right: int
    start: int
    stop: int
    holders: Holders


class Cuts:
    """One of the two layouts: what its places hold, and which rank a place is.

    A layer's holders are named without their stage (the same in every stage); `ranks` puts the stage back.
    """

    def __init__(self, shape: JobShape, layout: Layout, order: tuple[str, ...]) -> None:
        self.shape, self.layout, self.model = shape, layout, shape.model
        self.replicas = layout.dp * layout.cp
        sizes = [getattr(layout, axis) for axis in order]
        mesh = np.arange(layout.num_ranks).reshape(sizes)
        places = mesh.transpose([order.index(axis) for axis in ("pp", "tp", "dp", "cp")])
        self._rank_at = places.reshape(-1)  # by place
        self._per_stage = layout.tp * self.replicas
        chunks = layout.chunk_bounds(self.model)
        self.stage_of = [c % layout.pp for c, (first, last) in enumerate(chunks) for _ in range(first, last)]
        self._chunk_of = [chunk for chunk in chunks for _ in range(*chunk)]
        self._sets: dict[Holders, int] = {}
        self._ranks: dict[tuple[int, int], tuple[int, ...]] = {}

    def intern(self, holders: Holders) -> int:
        return self._sets.setdefault(holders, len(self._sets))

    def ranks(self, holder_set: int, stage: int) -> tuple[int, ...]:
        known = self._ranks.get((holder_set, stage))
        if known is None:
            if len(self._members) < len(self._sets):
                self.__dict__.pop("_members")
            places = np.fromiter(self._members[holder_set], dtype=np.int64) + stage * self._per_stage
            known = tuple(sorted(self._rank_at[places].tolist()))
            self._ranks[holder_set, stage] = known
        return known

    @cached_property
    def _members(self) -> list[Holders]:
        return list(self._sets)

    def layer_intervals(self, layers: Iterable[int]) -> Found:
        """Intervals of the given layers' tensors; holders are named as if on stage 0."""
        found: Found = defaultdict(list)
        chosen = set(layers)
        spans = {self._chunk_of[n] if self.layout.zero_buckets == "stage" else (n, n + 1) for n in chosen}
        for span in sorted(spans):
            tensors = [t for layer in range(*span) for t in layer_tensors(self.shape)[layer]]
            self._cut("layers", [t for t in tensors if t.expert is None], 0, found, chosen)
            per_rank = self.model.experts // self.layout.ep
            for expert_rank in range(self.layout.ep) if self.model.experts else ():
                held = [t for t in tensors if t.expert is not None and t.expert // per_rank == expert_rank]
                self._cut("experts", held, 0, found, chosen, range(expert_rank, self.replicas, self.layout.ep))
        return found

    def end_intervals(self) -> Found:
        """Intervals of what lies outside the layers; here holders name their stage."""
        found: Found = defaultdict(list)
        embedding, head = end_tensors(self.shape)
        last = self.layout.pp - 1
        tied_copy = [t for t in embedding if self.model.tied and last and t.name == "embedding.weight"]
        self._cut("embedding", list(embedding), 0, found)
        self._cut("head", [*tied_copy, *head], last, found)
        return found

    def _cut(
        self,
        name: str,
        tensors: list[LogicalTensor],
        stage: int,
        found: Found,
        layers: set[int] | None = None,
        replicas: range | None = None,
    ) -> None:
        """One bucket on all its places: whole shards for weights, ZeRO slices for the optimizer."""
        if not tensors:
            return
        replicas = replicas or range(self.replicas)
        zero, num, owner = self.layout.zero, len(replicas), bucket_owner(self.layout, name, len(replicas))
        for tp_rank in range(self.layout.tp):
            first = (stage * self.layout.tp + tp_rank) * self.replicas
            everyone = frozenset(first + replica for replica in replicas)
            shapes = tuple(t.local_shape(self.layout.tp, tp_rank) for t in tensors)
            bucket = Bucket(name, tuple(tensors), shapes, num, 0, zero >= 1, owner)
            slices = [bucket.slice_of(r) for r in range(num)]
            each = max(1, slices[0][1])
            for tensor, at in zip(tensors, bucket.offsets, strict=True):
                left, right, base, size = _shard(tensor, self.layout.tp, tp_rank)
                if not size or (layers is not None and tensor.layer not in layers):
                    continue
                whole = [Interval(left, right, base, base + size, everyone)]
                touching = range(at // each, -(-(at + size) // each)) if owner is None else (owner,)
                parts = [
                    Interval(
                        left,
                        right,
                        base + max(slices[r][0] - at, 0),
                        base + min(slices[r][1] - at, size),
                        frozenset((first + replicas[r],)),
                    )
                    for r in touching
                ] if zero else whole  # fmt: skip
                found[tensor.name, WEIGHT] += parts if zero == 3 else whole
                found[tensor.name, OPTIMIZER] += parts


def _shard(tensor: LogicalTensor, tp: int, tp_rank: int) -> tuple[int, int, int, int]:
    """(left, right) columns, first element and number of elements of a shard, as an interval of its window."""
    rows, columns = _matrix(tensor)
    if tensor.tp_dim is None:
        return 0, columns, 0, rows * columns
    start, stop = tensor.bounds(tp, tp_rank)
    if tensor.tp_dim == 0:
        return 0, columns, start * columns, (stop - start) * columns
    return start, stop, 0, rows * (stop - start)


def _matrix(tensor: LogicalTensor) -> tuple[int, int]:
    """A vector is a matrix of one column."""
    assert len(tensor.shape) in (1, 2), tensor
    return tensor.shape if len(tensor.shape) == 2 else (tensor.shape[0], 1)  # type: ignore[return-value]


def disjoint(intervals: list[Interval]) -> list[Interval]:
    """The same elements in intervals that do not overlap, each with everyone who holds it."""
    whole: dict[tuple[int, int, int, int], Holders] = {}
    for *span, holders in intervals:
        key = tuple(span)
        whole[key] = whole[key] | holders if key in whole else holders  # type: ignore[index]
    merged = [Interval(*span, holders) for span, holders in sorted(whole.items(), key=lambda item: item[0])]
    clean = all((a.left, a.right) != (b.left, b.right) or a.stop <= b.start for a, b in pairwise(merged))
    return merged if clean else [part for window in _by_window(merged) for part in _refine(window)]


def _by_window(intervals: list[Interval]) -> Iterable[list[Interval]]:
    windows: dict[tuple[int, int], list[Interval]] = defaultdict(list)
    for interval in intervals:
        windows[interval.left, interval.right].append(interval)
    return windows.values()


def _refine(intervals: list[Interval]) -> Iterator[Interval]:
    """Cut at every end (a sweep); equal neighbours stay cut, which costs a little and harms nothing."""
    left, right = intervals[0].left, intervals[0].right
    cuts = sorted({i.start for i in intervals} | {i.stop for i in intervals})
    for start, stop in pairwise(cuts):
        holding = [i.holders for i in intervals if i.start <= start and stop <= i.stop]
        if holding:
            yield Interval(left, right, start, stop, frozenset().union(*holding))


@lru_cache(maxsize=64)
def layer_tensors(shape: JobShape) -> tuple[tuple[LogicalTensor, ...], ...]:
    by_layer: list[list[LogicalTensor]] = [[] for _ in range(shape.model.layers)]
    for tensor in logical_tensors(shape.model, shape.sequence_length):
        if tensor.layer is not None:
            by_layer[tensor.layer].append(tensor)
    return tuple(map(tuple, by_layer))


@lru_cache(maxsize=64)
def end_tensors(shape: JobShape) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
    """(embedding side, head side)."""
    ends = [t for t in logical_tensors(shape.model, shape.sequence_length) if t.layer is None]
    return tuple(t for t in ends if t.place == "embedding"), tuple(t for t in ends if t.place == "head")
