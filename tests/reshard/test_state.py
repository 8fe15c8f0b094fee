"""What ranks hold: every element in the right number of copies, every buffer full, for any layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import layouts, shapes

from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.model import ModelSpec
from suika.core.tensors import logical_tensors
from suika.reshard.state import buffer_specs, optimizer_kinds, rank_buckets, rank_regions, zero_slice

KV_COPIES = ("attention.k.", "attention.v.")


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_element_is_held_as_often_as_the_layout_says(data: st.DataObject) -> None:
    """Weights once per replica (tied tables twice over stages, key/value heads and uncut tensors once per tp rank);
    masters and moments once among the replicas from ZeRO 1 on, and none of frozen tensors. Buffers are full and regions
    never overlap."""
    shape = data.draw(shapes())
    model, layout = shape.model, data.draw(layouts(shape.model)).resolve(shape.model)
    whole = {t.name: t for t in logical_tensors(model, shape.sequence_length)}
    copies = {
        (name, kind): np.zeros(t.shape, dtype=int)
        for name, t in whole.items()
        for kind in ("weight", *(optimizer_kinds(shape.precision) if t.trained else ()))
    }
    for rank in range(layout.num_ranks):
        args = (model, layout, shape.sequence_length, shape.precision, rank)
        filled: Counter[str] = Counter()
        for region in rank_regions(*args):
            assert region.offset == filled[region.buffer], "regions follow each other without a gap"
            filled[region.buffer] += region.box.numel
            copies[region.key][region.box.slices] += 1
        sizes = {name: int(np.prod(size)) for name, (size, _) in buffer_specs(*args).items()}
        assert {name: size for name, size in sizes.items() if size} == dict(filled)
    replicas = layout.dp * layout.cp
    for (name, kind), held in copies.items():
        tensor = whole[name]
        times = replicas // (layout.ep if tensor.expert is not None else 1)
        if layout.zero == 3 or (kind != "weight" and layout.zero):
            times = 1
        if tensor.tp_dim is None:
            times *= layout.tp
        elif any(part in name for part in KV_COPIES) and model.kv_heads < layout.tp:
            times *= layout.tp // model.kv_heads
        if name == "embedding.weight" and model.tied and layout.pp > 1:
            times *= 2
        assert (held == times).all(), (name, kind, held, times)


def test_slices_follow_the_model_where_buckets_span_a_stage() -> None:
    """The first replica has the embedding's moments, the last the head's, and layers are cut evenly in between."""
    model = ModelSpec("m", "llama", 4, 8, 8, 2, 10)
    layout = Layout(pp=2, dp=2, zero_buckets="stage").resolve(model)
    first, last = (rank_buckets(model, layout, 4, Mesh(layout).rank(pp=pp, dp=dp)) for pp, dp in ((0, 0), (1, 1)))
    assert [(b.name, b.slice[1] - b.slice[0] == b.numel) for b in first] == [("embedding", True), ("layers.0-1", False)]
    assert [(b.name, b.slice[1] - b.slice[0] == b.numel) for b in last] == [("layers.2-3", False), ("head", True)]
    other = rank_buckets(model, layout, 4, Mesh(layout).rank(pp=0, dp=1))[0]
    assert other.slice == (other.numel, other.numel)


@given(st.integers(0, 200), st.integers(1, 20))
def test_slices_are_in_order_and_complete(numel: int, replicas: int) -> None:
    slices = [zero_slice(numel, replicas, r) for r in range(replicas)]
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(numel))
    assert max(stop - start for start, stop in slices) == -(-numel // replicas)
