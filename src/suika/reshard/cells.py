"""Cells: the pieces in which state moves, and who holds each before and after.

A cell is a box of one tensor inside which neither layout has a cut: every rank holds all of it or nothing. Cells with
the same old and the same new holders form a `Group`, the unit of routing: a rank's view of a move is some thousand
groups, however many tensors the model has. Weights and the optimizer's state are grouped apart: weights can move first.

Layers of a kind are cut alike, so cells are computed once per kind of layer, not once per layer: a 70B model over 1,024
ranks takes a tenth of a second. An interval of `cuts.py` becomes up to three boxes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from suika.core.layout import Layout
from suika.core.mesh import DEFAULT_ORDER
from suika.core.tensors import LogicalTensor
from suika.reshard.cuts import OPTIMIZER, WEIGHT, Cuts, Found, disjoint, end_tensors, layer_tensors
from suika.reshard.regions import Box
from suika.reshard.state import ITEM_BYTES, JobShape, StateKey, optimizer_kinds, weight_dtype


class Cell(NamedTuple):
    """Elements that move as one; `item_bytes` is the width of an element."""

    key: StateKey
    box: Box
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.item_bytes


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
    weights: bool  # model weights, or masters and moments
    num_bytes: int
    blocks: tuple[Block, ...]

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """Widest elements first, so that every cell of the group's byte stream starts aligned; kind by kind, so that
        what lies side by side in a bucket does so on the wire."""
        cells = [cell for block in self.blocks for cell in block.unit.expand(block.rows, block.layers)]
        return tuple(sorted(cells, key=lambda cell: (-cell.item_bytes, cell.key.kind)))

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each cell ends in the group's byte stream."""
        return tuple(accumulate(cell.num_bytes for cell in self.cells))


@lru_cache(maxsize=64)  # up to some MB each
def groups_of(
    shape: JobShape,
    old: Layout,
    new: Layout,
    old_order: tuple[str, ...] = DEFAULT_ORDER,
    new_order: tuple[str, ...] = DEFAULT_ORDER,
) -> tuple[Group, ...]:
    """All state of a job, grouped by (weights or not, old ranks, new ranks), weights first; every element is in exactly
    one cell.

    A pure function of the layouts: which device runs which rank comes later.
    """
    sides = (Cuts(shape, old.resolve(shape.model), old_order), Cuts(shape, new.resolve(shape.model), new_order))
    found: dict[tuple[int, tuple[int, ...], tuple[int, ...]], list[tuple[int, Block]]] = defaultdict(list)
    for unit in _units(shape, *sides):
        for (stage_old, stage_new), layers in unit.runs.items():
            times = max(1, len(layers))
            for kind, old_set, new_set, rows, num_bytes in unit.pairs:
                key = kind, unit.old.ranks(old_set, stage_old), unit.new.ranks(new_set, stage_new)
                found[key].append((num_bytes * times, Block(unit, rows, layers)))
    groups = []
    for (kind, old_ranks, new_ranks), parts in sorted(found.items(), key=lambda item: item[0]):
        sizes, blocks = zip(*parts, strict=True)
        groups.append(Group(old_ranks, new_ranks, kind == WEIGHT, sum(sizes), blocks))
    return tuple(groups)


@dataclass(frozen=True, eq=False)
class _Unit:
    """Tensors that are cut alike: `runs` maps (old stage, new stage) to the layers for which the table stands."""

    tensors: tuple[LogicalTensor, ...]
    names: tuple[str, ...]  # tensor names, with {} where the layer goes
    runs: dict[tuple[int, int], tuple[int, ...]]
    old: Cuts
    new: Cuts
    table: CellTable
    widths: tuple[tuple[tuple[str, int], ...], ...]  # by kind group: (kind, bytes per element)

    @cached_property
    def pairs(self) -> list[tuple[int, int, int, np.ndarray, int]]:
        """(WEIGHT or OPTIMIZER, old holder set, new holder set, rows of the table, bytes per layer)."""
        table = self.table
        width = np.array([sum(w for _, w in kinds) for kinds in self.widths])
        num_bytes = np.prod(table.box[:, 1::2] - table.box[:, ::2], axis=1) * width[table.kind]
        code = (table.kind * (int(table.old.max(initial=0)) + 1) + table.old) * (int(table.new.max(initial=0)) + 1)
        code += table.new
        order = np.argsort(code, kind="stable")
        starts = np.flatnonzero(np.diff(code[order], prepend=-1))
        sums = np.add.reduceat(num_bytes[order], starts).tolist()
        rows = np.split(order, starts[1:])
        kind, old, new = (column[order[starts]].tolist() for column in (table.kind, table.old, table.new))
        return list(zip(kind, old, new, rows, sums, strict=True))

    def expand(self, rows: np.ndarray, layers: tuple[int, ...]) -> Iterator[Cell]:
        for layer in layers or (None,):
            for row in rows.tolist():
                tensor = self.tensors[self.table.tensor[row]]
                r0, r1, c0, c1 = self.table.box[row].tolist()
                box = Box((r0, c0), (r1, c1)) if len(tensor.shape) == 2 else Box((r0,), (r1,))
                name = self.names[self.table.tensor[row]].format(layer)
                for kind, width in self.widths[self.table.kind[row]]:
                    yield Cell(StateKey(name, kind), box, width)


def _units(shape: JobShape, old: Cuts, new: Cuts) -> Iterator[_Unit]:
    """The ends, and each kind of layer: dense or mixture, and cut in the same places by both layouts."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for layer in range(shape.model.layers):
        kinds[shape.model.is_moe_layer(layer), old.signature(layer), new.signature(layer)].append(layer)
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
    old: Cuts,
    new: Cuts,
    old_cut: Found,
    new_cut: Found,
) -> _Unit:
    names = tuple(t.name if t.layer is None else t.name.replace(f"layers.{t.layer}.", "layers.{}.", 1) for t in tensors)
    optimizer = tuple((kind, ITEM_BYTES[dtype]) for kind, dtype in optimizer_kinds(shape.precision).items())
    widths = ((("weight", ITEM_BYTES[weight_dtype(shape.precision)]),), optimizer)
    table = _join(_rows(tensors, old, old_cut), _rows(tensors, new, new_cut))
    return _Unit(tensors, names, runs, old, new, table, widths)


def _rows(tensors: tuple[LogicalTensor, ...], side: Cuts, cut: Found) -> np.ndarray:
    """One row per box, sorted by (tensor, kind): tensor * 2 + kind, r0, r1, c0, c1, holder set."""
    rows = []
    for index, tensor in enumerate(tensors):
        for kind in (WEIGHT, OPTIMIZER):
            for left, right, start, stop, holders in disjoint(cut[tensor.name, kind]):
                holder_set, width = side.number(holders), right - left
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
