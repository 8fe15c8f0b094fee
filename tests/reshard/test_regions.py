"""Boxes, flat ranges and refinement against plain index sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.reshard.regions import Box, flat_range, refine

SIDE = 5


@st.composite
def boxes(draw: st.DrawFn, num_dims: int = 2) -> Box:
    sides = [sorted(draw(st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)))) for _ in range(num_dims)]
    return Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))


def elements(box: Box) -> set[tuple[int, ...]]:
    return {tuple(map(int, index + np.array(box.starts))) for index in np.ndindex(*box.shape)}


@given(boxes(), boxes())
def test_intersection_and_containment_are_those_of_the_elements(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    if a.numel:
        assert b.contains(a) == (elements(a) <= elements(b))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_flat_range_walks_the_elements_in_row_major_order(shape: list[int], data: st.DataObject) -> None:
    box = Box.whole(tuple(shape)).shifted((-3,) * len(shape))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))
    flat = np.arange(box.numel).reshape(shape)
    parts = list(flat_range(box, start, stop))
    walked = [int(x) for part in parts for x in flat[part.shifted(box.starts).slices].reshape(-1)]
    assert walked == list(range(start, stop))
    assert len(parts) <= 2 * len(shape) - 1


@settings(max_examples=50)
@given(st.lists(boxes(), max_size=6))
def test_cells_cover_every_box_disjointly_and_cross_no_edge(given_boxes: list[Box]) -> None:
    cells = refine(given_boxes)
    for i, cell in enumerate(cells):
        assert not any(cell.intersect(other) for other in cells[:i])
        for box in given_boxes:
            assert box.contains(cell) or box.intersect(cell) is None
    covered = set().union(*map(elements, cells)) if cells else set()
    assert covered == set().union(*map(elements, given_boxes)) if given_boxes else covered == set()


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.numel == 1
    assert list(flat_range(scalar, 0, 1)) == [scalar]
    assert refine([scalar, scalar]) == [scalar]
