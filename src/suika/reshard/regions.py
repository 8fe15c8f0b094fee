"""Boxes of logical tensors: the algebra under every move.

A `Box` is half-open in each dim, in the coordinates of the *logical* tensor (the whole model's), never of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import NamedTuple


class Box(NamedTuple):
    """The elements with starts[d] <= x[d] < stops[d]. A box without dims holds one element (a scalar tensor)."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common elements; None when there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(a < b for a, b in zip(starts, stops, strict=True)) else None

    def contains(self, other: Box) -> bool:
        return all(map(int.__le__, self.starts, other.starts)) and all(map(int.__ge__, self.stops, other.stops))

    def shifted(self, origin: tuple[int, ...]) -> Box:
        """The same elements counted from `origin`."""
        return Box(
            tuple(a - o for a, o in zip(self.starts, origin, strict=True)),
            tuple(b - o for b, o in zip(self.stops, origin, strict=True)),
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in zip(self.starts, self.stops, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.starts, self.stops, strict=True)) + "]"


def flat_range(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Boxes that hold elements [start, stop) of `box` in row-major order, themselves in that order.

    At most 2 x dims - 1 of them: a partial row, whole rows, a partial row, and so on up the dims.
    """
    if start >= stop:
        return
    if not box.starts:
        yield box
        return
    inner = Box(box.starts[1:], box.stops[1:])
    row = inner.numel
    first, last = start // row, (stop - 1) // row  # rows touched

    def at(row_start: int, row_stop: int, rest: Box) -> Box:
        return Box((box.starts[0] + row_start, *rest.starts), (box.starts[0] + row_stop, *rest.stops))

    def part_of_row(r: int) -> Iterator[Box]:
        for rest in flat_range(inner, max(start - r * row, 0), min(stop - r * row, row)):
            yield at(r, r + 1, rest)

    whole_from = first if start == first * row else first + 1
    whole_to = last + 1 if stop == (last + 1) * row else last
    if whole_from > first:
        yield from part_of_row(first)
    if whole_from < whole_to:
        yield at(whole_from, whole_to, inner)
    if whole_to <= last and last >= whole_from:
        yield from part_of_row(last)


def refine(boxes: Iterable[Box]) -> list[Box]:
    """The cells of the grid through every cut of `boxes` that lie in at least one of them, in row-major order.

    Each box is the disjoint union of the cells inside it; a cell lies wholly in a box or outside it.
    """
    distinct = list(dict.fromkeys(box for box in boxes if box.numel))
    if not distinct:
        return []
    num_dims = len(distinct[0].starts)
    cuts = [sorted({box[side][d] for box in distinct for side in (0, 1)}) for d in range(num_dims)]
    sides = [list(pairwise(at)) for at in cuts]
    grid = (Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in product(*sides))
    return [cell for cell in grid if any(box.contains(cell) for box in distinct)]
