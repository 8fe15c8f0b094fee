"""Cells: the pieces in which state moves, and who holds each before and after.

A cell is a box of one tensor inside which neither layout has a cut: every rank holds all of it or nothing. Cells with
the same old and the same new holders form a `Group`, the unit of routing: a rank's view of a move is some thousand
groups, however many tensors the model has.

Layers of a kind are cut alike, so cells are computed once per kind of layer, not once per layer: a 70B model over 1,024
ranks takes a tenth of a second. Under ZeRO a rank's slice of a matrix is a flat range of its shard: `Interval`s in a
window of columns, which become up to three boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from suika.core.layout import Layout
from suika.core.mesh import DEFAULT_ORDER
from suika.core.tensors import LogicalTensor, logical_tensors
from suika.reshard.regions import Box
from suika.reshard.state import ITEM_BYTES, JobShape, StateKey, optimizer_kinds, weight_dtype, zero_slice

WEIGHT, OPTIMIZER = 0, 1  # kinds that are cut alike: masters and moments share their geometry
Holders = frozenset[int]  # places (stage * tp + tp rank) * replicas + replica; stage 0 for layers, see `_Side`


class Cell(NamedTuple):
    """Elements that move as one; `item_bytes` is the width of an element."""

    key: StateKey
    box: Box
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.item_bytes


class Interval(NamedTuple):
    """Elements [start, stop), row-major, of the columns [left, right) of a tensor, and the places that hold them."""

    left: int
    right: int
    start: int
    stop: int
    holders: Holders


class CellTable(NamedTuple):
    """Cells of one kind of layer (or of the tensors outside the layers) as columns."""

    tensor: np.ndarray  # index into the unit's tensors
    kind: np.ndarray  # WEIGHT or OPTIMIZER
    box: np.ndarray  # n x 4: row start, row stop, column start, column stop
    old: np.ndarray  # holder set ids
    new: np.ndarray


@dataclass(frozen=True)
class Block:
    """Rows `rows` of a unit's cell table, for each of `layers` (or once, outside the layers)."""

    unit: _Unit
    rows: np.ndarray
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Cells with the same old and new holders. `old` and `new` are ranks of the two layouts, ascending."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    num_bytes: int
    blocks: tuple[Block, ...]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Widest elements first, so that every cell of the group's byte stream starts aligned."""
        cells = [cell for block in self.blocks for cell in block.unit.expand(block.rows, block.layers)]
        return tuple(sorted(cells, key=lambda cell: -cell.item_bytes))


@lru_cache(maxsize=256)
def groups_of(
    shape: JobShape,
    old: Layout,
    new: Layout,
    old_order: tuple[str, ...] = DEFAULT_ORDER,
    new_order: tuple[str, ...] = DEFAULT_ORDER,
) -> tuple[Group, ...]:
    """All state of a job, grouped by (old ranks, new ranks); every element is in exactly one cell.

    A pure function of the layouts: which device runs which rank comes later.
    """
    sides = (_Side(shape, old.resolve(shape.model), old_order), _Side(shape, new.resolve(shape.model), new_order))
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, Block]]] = defaultdict(list)
    for unit in _units(shape, *sides):
        for (stage_old, stage_new), layers in unit.runs.items():
            times = max(1, len(layers))
            for old_set, new_set, rows, num_bytes in unit.pairs:
                key = unit.old.ranks(old_set, stage_old), unit.new.ranks(new_set, stage_new)
                found[key].append((num_bytes * times, Block(unit, rows, layers)))
    return tuple(
        Group(old_ranks, new_ranks, sum(size for size, _ in parts), tuple(block for _, block in parts))
        for (old_ranks, new_ranks), parts in sorted(found.items())
    )


class _Side:
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

    def layer_intervals(self, layers: Iterable[int]) -> dict[tuple[str, int], list[Interval]]:
        """(tensor, kind) -> intervals of the given layers' tensors."""
        chosen = set(layers)
        buckets: dict[tuple[int, int], list[LogicalTensor]] = {}
        for layer in sorted(chosen):
            span = self._chunk_of[layer] if self.layout.zero_buckets == "stage" else (layer, layer + 1)
            if span not in buckets:
                buckets[span] = [t for one in range(*span) for t in layer_tensors(self.shape)[one]]
        found: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        for tensors in buckets.values():
            self._cut([t for t in tensors if t.expert is None], 0, None, found, chosen)
            per_rank = self.model.experts // self.layout.ep
            for expert_rank in range(self.layout.ep) if self.model.experts else ():
                held = [t for t in tensors if t.expert is not None and t.expert // per_rank == expert_rank]
                self._cut(held, 0, expert_rank, found, chosen)
        return found

    def end_intervals(self) -> dict[tuple[str, int], list[Interval]]:
        """Embedding and head; here holders name their stage."""
        found: dict[tuple[str, int], list[Interval]] = defaultdict(list)
        embedding, head = end_tensors(self.shape)
        last = self.layout.pp - 1
        self._cut(list(embedding), 0, None, found)
        tied_copy = [t for t in embedding if self.model.tied and last and t.name == "embedding.weight"]
        self._cut([*tied_copy, *head], last, None, found)
        return found

    def _cut(
        self,
        tensors: list[LogicalTensor],
        stage: int,
        expert_rank: int | None,
        found: dict[tuple[str, int], list[Interval]],
        layers: set[int] | None = None,
    ) -> None:
        """One bucket, on all its places: whole shards for weights, ZeRO slices for the optimizer."""
        if not tensors:
            return
        step = 1 if expert_rank is None else self.layout.ep
        replicas = range(expert_rank or 0, self.replicas, step)
        for tp_rank in range(self.layout.tp):
            first = (stage * self.layout.tp + tp_rank) * self.replicas
            everyone = frozenset(first + replica for replica in replicas)
            owners = [frozenset((first + replica,)) for replica in replicas]
            shards = [_shard(t, self.layout.tp, tp_rank) for t in tensors]
            numel, at = sum(size for _, _, _, size in shards), 0
            each = zero_slice(numel, len(owners), 0)[1]
            for tensor, (left, right, base, size) in zip(tensors, shards, strict=True):
                if size and (layers is None or tensor.layer in layers):
                    whole = [Interval(left, right, base, base + size, everyone)]
                    parts = [
                        Interval(
                            left, right, base + max(r * each - at, 0), base + min((r + 1) * each - at, size), owners[r]
                        )
                        for r in range(at // each, -(-(at + size) // each))
                    ]
                    found[tensor.name, WEIGHT] += parts if self.layout.zero == 3 else whole
                    found[tensor.name, OPTIMIZER] += parts if self.layout.zero else whole
                at += size


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


@dataclass(frozen=True, eq=False)
class _Unit:
    """Tensors that are cut alike: `runs` maps (old stage, new stage) to the layers for which the table stands."""

    tensors: tuple[LogicalTensor, ...]
    names: tuple[str, ...]  # tensor names, with {} where the layer goes
    runs: dict[tuple[int, int], tuple[int, ...]]
    old: _Side
    new: _Side
    table: CellTable
    widths: tuple[tuple[tuple[str, int], ...], ...]  # by kind group: (kind, bytes per element)

    @cached_property
    def pairs(self) -> list[tuple[int, int, np.ndarray, int]]:
        """(old holder set, new holder set, rows of the table, bytes per layer)."""
        table = self.table
        width = np.array([sum(w for _, w in kinds) for kinds in self.widths])
        num_bytes = np.prod(table.box[:, 1::2] - table.box[:, ::2], axis=1) * width[table.kind]
        code = table.old.astype(np.int64) * (int(table.new.max(initial=0)) + 1) + table.new
        order = np.argsort(code, kind="stable")
        starts = np.flatnonzero(np.diff(code[order], prepend=-1))
        sums = np.add.reduceat(num_bytes[order], starts).tolist() if len(starts) else []
        rows = np.split(order, starts[1:])
        old, new = table.old[order[starts]].tolist(), table.new[order[starts]].tolist()
        return list(zip(old, new, rows, sums, strict=False))

    def expand(self, rows: np.ndarray, layers: tuple[int, ...]) -> Iterator[Cell]:
        for layer in layers or (None,):
            for row in rows.tolist():
                tensor = self.tensors[self.table.tensor[row]]
                r0, r1, c0, c1 = self.table.box[row].tolist()
                box = Box((r0, c0), (r1, c1)) if len(tensor.shape) == 2 else Box((r0,), (r1,))
                name = self.names[self.table.tensor[row]].format(layer)
                for kind, width in self.widths[self.table.kind[row]]:
                    yield Cell(StateKey(name, kind), box, width)


def _units(shape: JobShape, old: _Side, new: _Side) -> Iterator[_Unit]:
    """The ends, and each kind of layer: dense or mixture, or every layer by itself where buckets span layers."""
    alike = old.layout.zero_buckets == new.layout.zero_buckets == "layer"
    kinds: dict[object, list[int]] = defaultdict(list)
    for layer in range(shape.model.layers):
        kinds[shape.model.is_moe_layer(layer) if alike else layer].append(layer)
    samples = [layers[0] for layers in kinds.values()]
    embedding, head = end_tensors(shape)
    cut = old.layer_intervals(samples), new.layer_intervals(samples)
    for layers in kinds.values():
        runs: dict[tuple[int, int], list[int]] = defaultdict(list)
        for layer in layers:
            runs[old.stage_of[layer], new.stage_of[layer]].append(layer)
        tensors = layer_tensors(shape)[layers[0]]
        yield _unit(shape, tensors, {run: tuple(held) for run, held in runs.items()}, old, new, *cut)
    yield _unit(shape, (*embedding, *head), {(0, 0): ()}, old, new, old.end_intervals(), new.end_intervals())


def _unit(
    shape: JobShape,
    tensors: tuple[LogicalTensor, ...],
    runs: dict[tuple[int, int], tuple[int, ...]],
    old: _Side,
    new: _Side,
    old_cut: dict[tuple[str, int], list[Interval]],
    new_cut: dict[tuple[str, int], list[Interval]],
) -> _Unit:
    names = tuple(t.name if t.layer is None else t.name.replace(f"layers.{t.layer}.", "layers.{}.", 1) for t in tensors)
    optimizer = tuple((kind, ITEM_BYTES[dtype]) for kind, dtype in optimizer_kinds(shape.precision).items())
    widths = ((("weight", ITEM_BYTES[weight_dtype(shape.precision)]),), optimizer)
    table = _join(_rows(tensors, old, old_cut), _rows(tensors, new, new_cut))
    return _Unit(tensors, names, runs, old, new, table, widths)


def _rows(tensors: tuple[LogicalTensor, ...], side: _Side, cut: dict[tuple[str, int], list[Interval]]) -> np.ndarray:
    """One row per box, sorted by (tensor, kind): tensor * 2 + kind, r0, r1, c0, c1, holder set."""
    rows = []
    for index, tensor in enumerate(tensors):
        for kind in (WEIGHT, OPTIMIZER):
            for left, right, start, stop, holders in disjoint(cut[tensor.name, kind]):
                holder_set, width = side.intern(holders), right - left
                first, head = divmod(start, width)
                last, tail = divmod(stop, width)
                if first == last:  # inside one row
                    rows.append((index * 2 + kind, first, first + 1, left + head, left + tail, holder_set))
                    continue
                if head:
                    rows.append((index * 2 + kind, first, first + 1, left + head, right, holder_set))
                if first + bool(head) < last:
                    rows.append((index * 2 + kind, first + bool(head), last, left, right, holder_set))
                if tail:
                    rows.append((index * 2 + kind, last, last + 1, left, left + tail, holder_set))
    return np.array(rows, dtype=np.int64).reshape(-1, 6)


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


def _join(old: np.ndarray, new: np.ndarray) -> CellTable:
    """Every non-empty intersection of an old and a new box of the same tensor and kind."""
    first = np.searchsorted(new[:, 0], old[:, 0], side="left")
    counts = np.searchsorted(new[:, 0], old[:, 0], side="right") - first
    i = np.repeat(np.arange(len(old)), counts)
    j = np.arange(len(i)) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    r0 = np.maximum(old[i, 1], new[j, 1])
    r1 = np.minimum(old[i, 2], new[j, 2])
    kept = np.flatnonzero(r0 < r1)
    i, j, r0, r1 = i[kept], j[kept], r0[kept], r1[kept]
    c0 = np.maximum(old[i, 3], new[j, 3])
    c1 = np.minimum(old[i, 4], new[j, 4])
    kept = np.flatnonzero(c0 < c1)
    i, j = i[kept], j[kept]
    box = np.stack([r0[kept], r1[kept], c0[kept], c1[kept]], axis=1)
    return CellTable(old[i, 0] // 2, old[i, 0] % 2, box, old[i, 5], new[j, 5])


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
