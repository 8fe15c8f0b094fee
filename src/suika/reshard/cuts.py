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
from suika.reshard.state import JobShape, bucket_owner, zero_slice

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
        self._number: dict[Holders, int] = {}
        self._holders: list[Holders] = []
        self._ranks: dict[tuple[int, int], tuple[int, ...]] = {}

    def number(self, holders: Holders) -> int:
        """A small number for a set of holders, the same for equal sets."""
        if holders not in self._number:
            self._number[holders] = len(self._holders)
            self._holders.append(holders)
        return self._number[holders]

    def ranks(self, number: int, stage: int) -> tuple[int, ...]:
        """The ranks of holder set `number`, whose places are counted from `stage`; ascending."""
        known = self._ranks.get((number, stage))
        if known is None:
            places = np.fromiter(self._holders[number], dtype=np.int64) + stage * self._per_stage
            known = self._ranks[number, stage] = tuple(sorted(self._rank_at[places].tolist()))
        return known

    def signature(self, layer: int) -> tuple[object, ...]:
        """Equal for layers that are cut alike: what is trained, where in the layer slices end, and whose they are."""
        found: list[object] = [layer_kinds(self.shape)[layer]]
        if not self._stage_wide:
            return tuple(found)
        sizes, before, whole = (table[layer] for table in self._spans)
        for part, (_, replicas) in enumerate(self._parts(layer)):
            for tp_rank in range(self.layout.tp):
                at, size = int(before[part, tp_rank]), int(sizes[part, tp_rank])
                each = max(1, zero_slice(int(whole[part, tp_rank]), len(replicas), 0)[1])
                first, last = at // each, -(-(at + size) // each)
                found.append((first, last, tuple(r * each - at for r in range(first + 1, last))))
        return tuple(found)

    def layer_intervals(self, layers: Iterable[int]) -> Found:
        """Intervals of the given layers' tensors; holders are named as if on stage 0."""
        found: Found = defaultdict(list)
        _, before, whole = self._spans
        for layer in layers:
            for part, (tensors, replicas) in enumerate(self._parts(layer)):
                self._cut(tensors, 0, replicas, before[layer, part].tolist(), whole[layer, part].tolist(), None, found)
        return found

    def end_intervals(self) -> Found:
        """Intervals of what lies outside the layers; here holders name their stage."""
        found: Found = defaultdict(list)
        embedding, head = end_tensors(self.shape)
        last = self.layout.pp - 1
        tied_copy = tuple(t for t in embedding if self.model.tied and last and t.name == "embedding.weight")
        for name, stage, held in (("embedding", 0, embedding), ("head", last, (*tied_copy, *head))):
            for suffix, trained in (("", True), (".frozen", False)):
                tensors = tuple(t for t in held if t.trained == trained)
                owner = bucket_owner(self.layout, name + suffix, self.replicas)
                whole = [sum(_shard(t, self.layout.tp, r).size for t in tensors) for r in range(self.layout.tp)]
                self._cut(tensors, stage, range(self.replicas), [0] * self.layout.tp, whole, owner, found)
        return found

    @property
    def _stage_wide(self) -> bool:
        return self.layout.zero_buckets == "stage" and self.layout.zero > 0

    def _parts(self, layer: int) -> list[tuple[tuple[LogicalTensor, ...], range]]:
        """A layer's tensors by bucket, with the replicas that share it: dense ones, then those of each expert rank;
        trained ones, then frozen ones."""
        tensors = layer_tensors(self.shape)[layer]
        parts = self._sharing(tuple(t for t in tensors if t.trained))
        if self.model.frozen:
            parts += self._sharing(tuple(t for t in tensors if not t.trained))
        return parts

    def _sharing(self, tensors: tuple[LogicalTensor, ...]) -> list[tuple[tuple[LogicalTensor, ...], range]]:
        ep = self.layout.ep
        parts = [(tuple(t for t in tensors if t.expert is None), range(self.replicas))]
        if self.model.experts:
            per_rank = self.model.experts // ep
            for rank in range(ep):
                held = tuple(t for t in tensors if t.expert is not None and t.expert // per_rank == rank)
                parts.append((held, range(rank, self.replicas, ep)))
        return parts

    @cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[layer, part, tp rank] -> elements of the shards, of their bucket before them, of the whole bucket."""
        kind_of = layer_kinds(self.shape)
        kinds = {kind: layer for layer, kind in enumerate(kind_of)}
        of_kind = {
            kind: [
                [sum(_shard(t, self.layout.tp, tp_rank).size for t in tensors) for tp_rank in range(self.layout.tp)]
                for tensors, _ in self._parts(layer)
            ]
            for kind, layer in kinds.items()
        }
        sizes = np.array([of_kind[kind] for kind in kind_of])
        before, whole = np.zeros_like(sizes), sizes.copy()
        for first, last in set(self._chunk_of) if self._stage_wide else ():
            before[first:last] = np.cumsum(sizes[first:last], axis=0) - sizes[first:last]
            whole[first:last] = sizes[first:last].sum(axis=0)
        return sizes, before, whole

    def _cut(
        self,
        tensors: tuple[LogicalTensor, ...],
        stage: int,
        replicas: range,
        before: list[int],
        whole: list[int],
        owner: int | None,
        found: Found,
    ) -> None:
        """Neighbours of one bucket on all its places: whole shards for weights, ZeRO slices for the optimizer.

        By tp rank, the bucket has `before` elements in front of them and `whole` altogether.
        """
        zero, num = self.layout.zero, len(replicas)
        for tp_rank in range(self.layout.tp):
            first = (stage * self.layout.tp + tp_rank) * self.replicas
            everyone = frozenset(first + replica for replica in replicas)
            at, each = before[tp_rank], max(1, zero_slice(whole[tp_rank], num, 0)[1])
            for tensor in tensors:
                left, right, base, size = _shard(tensor, self.layout.tp, tp_rank)
                if not size:
                    continue
                shard = [Interval(left, right, base, base + size, everyone)]
                slices = shard
                if zero and owner is not None:
                    slices = [Interval(left, right, base, base + size, frozenset((first + replicas[owner],)))]
                elif zero:
                    slices = [
                        Interval(
                            left,
                            right,
                            base + max(r * each - at, 0),
                            base + min((r + 1) * each - at, size),
                            frozenset((first + replicas[r],)),
                        )
                        for r in range(at // each, -(-(at + size) // each))
                    ]
                found[tensor.name, WEIGHT] += slices if zero == 3 else shard
                if tensor.trained:
                    found[tensor.name, OPTIMIZER] += slices
                at += size


class _Shard(NamedTuple):
    """A tensor-parallel rank's shard as an interval of its window: columns, first element, number of elements."""

    left: int
    right: int
    start: int
    size: int


def _shard(tensor: LogicalTensor, tp: int, tp_rank: int) -> _Shard:
    rows, columns = _matrix(tensor)
    if tensor.tp_dim is None:
        return _Shard(0, columns, 0, rows * columns)
    start, stop = tensor.bounds(tp, tp_rank)
    if tensor.tp_dim == 0:
        return _Shard(0, columns, start * columns, (stop - start) * columns)
    return _Shard(start, stop, 0, rows * (stop - start))


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
def layer_kinds(shape: JobShape) -> tuple[int, ...]:
    """A number for each layer, the same where the same tensors are trained and frozen."""
    known: dict[object, int] = {}
    looks = [tuple((t.shape, t.trained) for t in tensors) for tensors in layer_tensors(shape)]
    return tuple(known.setdefault(look, len(known)) for look in looks)


@lru_cache(maxsize=64)
def end_tensors(shape: JobShape) -> tuple[tuple[LogicalTensor, ...], tuple[LogicalTensor, ...]]:
    """(embedding side, head side)."""
    ends = [t for t in logical_tensors(shape.model, shape.sequence_length) if t.layer is None]
    return tuple(t for t in ends if t.place == "embedding"), tuple(t for t in ends if t.place == "head")
