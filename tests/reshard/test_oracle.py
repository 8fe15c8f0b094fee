"""The labelled-element oracle over random jobs, layouts, placements and chains of moves."""

from __future__ import annotations

from itertools import pairwise

import labels
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import plans, shapes

from suika.reshard.cells import groups_of
from suika.reshard.state import rank_regions

CLUSTER = labels.cluster(nodes=3, devices=3)
RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@pytest.mark.parametrize("examples", [15, pytest.param(60, marks=pytest.mark.fault)])
def test_every_element_arrives_where_its_label_says(examples: int) -> None:
    @settings(max_examples=examples, **RELAXED)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        shape = data.draw(shapes())
        old, new = data.draw(plans(shape, CLUSTER)), data.draw(plans(shape, CLUSTER))
        labels.move_labelled(shape, old, new, CLUSTER, on_device=data.draw(st.booleans()))

    holds()


@settings(max_examples=8, **RELAXED)
@given(st.data())
def test_a_chain_of_moves_loses_nothing(data: st.DataObject) -> None:
    """What one move leaves is what the next one starts from; after the last every element is compared."""
    shape = data.draw(shapes())
    chain = data.draw(st.lists(plans(shape, CLUSTER), min_size=4, max_size=6))
    state = labels.state_of(shape, chain[0])
    for old, new in pairwise(chain):
        move = labels.plan_move(shape, old, new, CLUSTER, chunk_bytes=512)
        moved = labels.move_in_threads(move, state)
        state = {device: moved[device][0] for device in new.devices}
    labels.check_labels(shape, chain[-1], state)


@settings(max_examples=30, **RELAXED)
@given(st.data())
def test_cells_are_exactly_what_ranks_hold(data: st.DataObject) -> None:
    """Every rank's regions are the disjoint union of its groups' cells, on both sides; sizes add up."""
    shape = data.draw(shapes())
    old, new = data.draw(plans(shape, CLUSTER)), data.draw(plans(shape, CLUSTER))
    groups = groups_of(shape, old.layout, new.layout, old.order, new.order)
    assert all(sum(cell.num_bytes for cell in group.cells) == group.num_bytes for group in groups)
    for plan, side in ((old, "old"), (new, "new")):
        for rank in range(plan.layout.num_ranks):
            cells = [cell for group in groups if rank in getattr(group, side) for cell in group.cells]
            regions = rank_regions(shape.model, plan.layout, shape.sequence_length, shape.precision, rank, plan.order)
            assert sum(region.box.numel for region in regions) == sum(cell.box.numel for cell in cells)
            for cell in cells:
                assert sum(r.key == cell.key and r.box.contains(cell.box) for r in regions) == 1
