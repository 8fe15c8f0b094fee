"""Faults from the field, as moves that must come out right (numbers as in the list of scenarios)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import labels
import pytest
import torch

from suika.core.errors import SpecError
from suika.core.layout import Layout, check_layout, even_split
from suika.core.model import ModelSpec
from suika.reshard.buffers import allocate
from suika.reshard.execute import ReplicaMismatchError
from suika.reshard.moveplan import plan_move
from suika.reshard.state import JobShape, buffer_specs, rank_buckets, rank_regions, zero_slice

LLAMA = ModelSpec("llama", "llama", 2, 12, 12, 12, 16, kv_heads=12, head_dim=2)
CLUSTER = labels.cluster(nodes=4, devices=4)


def chain(shape: JobShape, *layouts: Layout) -> None:
    """Labelled state through `layouts` one after the other, each on the first devices of the cluster."""
    plans = [labels.plan(shape, layout, CLUSTER.devices[: layout.num_ranks]) for layout in layouts]
    for old, new in pairwise(plans):
        labels.move_labelled(shape, old, new, CLUSTER)


@pytest.mark.parametrize("path", [(1, 2, 4, 3, 1), (2, 3)])
def test_b03_gate_and_up_are_cut_apart(path: tuple[int, ...]) -> None:
    """SwiGLU's two halves are separate tensors: weight, m, v and master keep (gate or up, row, column) at every hop."""
    shape = JobShape(LLAMA, 4, "bf16")
    chain(shape, *(Layout(tp=tp) for tp in path))


@pytest.mark.parametrize("dp", [2, 3, 4, 7, 16, 1])
def test_b05_slices_cover_what_dp_does_not_divide(dp: int) -> None:
    slices = [zero_slice(1003, dp, rank) for rank in range(dp)]
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(1003))
    assert zero_slice(3, 16, 7) == (3, 3)  # empty


def test_b05_moments_survive_any_dp() -> None:
    """Buckets of odd sizes over dp 2 > 3 > 4 > 7 > 16 > 1; some ranks hold empty slices; nothing is padded."""
    model = ModelSpec("odd", "llama", 1, 6, 1, 1, 7, head_dim=2)
    shape = JobShape(model, 4, "fp32")
    path = [Layout(dp=dp) for dp in (2, 3, 4, 7, 16, 1)]
    chain(shape, *path)
    one = sum(
        math.prod(size) for name, (size, _) in buffer_specs(model, path[-1], 4, "fp32", 0).items() if name[0] == "m"
    )
    for layout in path:
        specs = [buffer_specs(model, layout, 4, "fp32", rank) for rank in range(layout.dp)]
        assert sum(math.prod(size) for s in specs for name, (size, _) in s.items() if name[0] == "m") == one
    assert any(b.slice[0] == b.slice[1] for b in rank_buckets(model, Layout(dp=16), 4, 15))


def test_b12_a_tied_embedding_has_one_state_and_equal_copies() -> None:
    model = replace(LLAMA, layers=6, tied=True)
    shape = JobShape(model, 4, "fp32")
    chain(shape, *(Layout(pp=pp) for pp in (1, 2, 3, 1)))
    names = {pp: [b.name for b in rank_buckets(model, Layout(pp=pp), 4, pp - 1)] for pp in (1, 3)}
    assert names == {1: ["embedding", *(f"layers.{i}" for i in range(6)), "head"], 3: ["head", "layers.4", "layers.5"]}
    # Merging copies that have drifted apart is an error, not a choice.
    old, new = (labels.plan(shape, Layout(pp=pp), CLUSTER.devices[:pp]) for pp in (2, 1))
    state = labels.state_of(shape, old)
    state[old.devices[1]]["weight/embedding.weight"][3, 4] *= 1 + 1e-3
    with pytest.raises(ReplicaMismatchError, match=r"weight of embedding\.weight.*rank 0 on n0/0 and rank 1 on n0/1"):
        labels.move_in_threads(plan_move(shape, old, new, CLUSTER), state)


def test_b15_every_layer_is_on_exactly_one_stage() -> None:
    """All L in 1..80 over all pp in 1..L; a rebuilt stage asks for global layer numbers."""
    for num_layers in range(1, 81):
        for pp in range(1, num_layers + 1):
            split = even_split(num_layers, pp)
            assert sum(split) == num_layers
            assert max(split) - min(split) <= 1
    with pytest.raises(SpecError, match=r"layers\(2\) < pipeline chunks\(3\)"):
        check_layout(Layout(pp=3), LLAMA, 12, 4)


def test_b15_uneven_stages_move_by_global_layer() -> None:
    model = ModelSpec("deep", "llama", 30, 4, 2, 2, 4, head_dim=2)
    old, new = Layout(pp=4, layers_per_stage=(7, 8, 8, 7)), Layout(pp=3, layers_per_stage=(10, 10, 10))
    chain(JobShape(model, 4, "fp32"), old, new, old)
    for layout in (old, new):
        held = [{r.key.tensor for r in rank_regions(model, layout, 4, "fp32", rank)} for rank in range(layout.pp)]
        layers = [sorted({int(name.split(".")[1]) for name in names if name[0] == "l"}) for names in held]
        assert [layer for stage in layers for layer in stage] == list(range(30))


def test_b25_the_live_buffer_is_what_is_written() -> None:
    """Checksums are of the returned buffers, which are the tensors allocated beforehand, 3-D or cut off-row."""
    shape = JobShape(LLAMA, 4, "bf16")
    old, new = (
        labels.plan(shape, Layout(tp=2), CLUSTER.devices[:2]),
        labels.plan(shape, Layout(tp=3), CLUSTER.devices[4:7]),
    )

    move = plan_move(shape, old, new, CLUSTER)
    live = {device: allocate(move, move.index(device), {}) for device in new.devices}
    before = {device: {name: t.data_ptr() for name, t in buffers.items()} for device, buffers in live.items()}
    assert all(t.isnan().all() for buffers in live.values() for t in buffers.values())
    labels.move_in_threads(move, labels.state_of(shape, old), new_buffers=live)
    labels.check_labels(shape, new, live)
    assert before == {device: {name: t.data_ptr() for name, t in buffers.items()} for device, buffers in live.items()}


def test_b27_drifted_norms_are_refused_by_name() -> None:
    """Rank 0 would keep its own copy and nothing need move: the merge refuses all the same."""
    shape = JobShape(LLAMA, 4, "fp32")
    old, new = (labels.plan(shape, Layout(tp=tp), CLUSTER.devices[:tp]) for tp in (2, 1))
    state = labels.state_of(shape, old)
    move = plan_move(shape, old, new, CLUSTER)
    labels.move_in_threads(move, state)
    norm = state[old.devices[1]]["weight/layers.1.mlp_norm.weight"]
    norm[5] *= 1 + 1e-3
    with pytest.raises(ReplicaMismatchError, match=r"weight of layers\.1\.mlp_norm\.weight.*rank 0 .*rank 1 "):
        labels.move_in_threads(move, state)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_b34_key_value_heads_fewer_than_ranks_are_copies(kv_heads: int) -> None:
    model = ModelSpec("gqa", "llama", 1, 16, 8, 8, 8, kv_heads=kv_heads)
    shape = JobShape(model, 4, "fp32")
    chain(shape, Layout(tp=4), Layout(tp=1), Layout(tp=2), Layout(tp=4))
    assert buffer_specs(model, Layout(tp=1), 4, "fp32", 0)["weight/layers.0.attention.k.weight"][0] == (
        kv_heads * 2,
        16,
    )
    with pytest.raises(SpecError, match=r"kv_heads\(3\) and tp\(2\)"):
        check_layout(Layout(tp=2), replace(model, heads=6, kv_heads=3, hidden=12, ffn=12, head_dim=2), 8, 4)


def test_b38_experts_keep_their_global_numbers() -> None:
    model = replace(LLAMA, experts=4, experts_per_token=2)
    shape = JobShape(model, 4, "bf16")
    path = [Layout(dp=4, ep=ep) for ep in (2, 1, 4, 2)]
    chain(shape, *path)
    for layout in path:
        held = {r.key.tensor for rank in range(4) for r in rank_regions(model, layout, 4, "bf16", rank)}
        assert {name.split(".")[3] for name in held if ".experts." in name} == {"0", "1", "2", "3"}


def test_kept_layers_are_the_same_storage() -> None:
    """A stage that stays is rebound: same tensors, nothing copied, nothing allocated for it."""
    shape = JobShape(LLAMA, 4, "fp32")
    old = labels.plan(shape, Layout(pp=2), CLUSTER.devices[:2])
    new = labels.plan(shape, Layout(pp=2), (CLUSTER.devices[0], CLUSTER.devices[5]))
    state = labels.state_of(shape, old)
    results = labels.move_in_threads(plan_move(shape, old, new, CLUSTER), state)
    kept, report = results[old.devices[0]]
    assert all(kept[name] is tensor for name, tensor in state[old.devices[0]].items())
    assert (report.allocated_bytes, report.local_copy_bytes, report.received_bytes) == (0, 0, 0)
    arrived, report = results[new.devices[1]]
    assert report.kept_bytes == 0
    assert report.allocated_bytes == report.received_bytes == sum(t.numel() * 4 for t in arrived.values())
    assert not any(torch.isnan(t).any() for t in arrived.values())
