"""The tp cut rule: every element of every tensor is held, by exactly the ranks that should hold it."""

from __future__ import annotations

import numpy as np
import pytest

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.tensors import logical_tensors, num_parameters, on_stage

LLAMA = ModelSpec("l", "llama", layers=3, hidden=48, ffn=96, heads=12, kv_heads=4, vocab=257)
GPT = ModelSpec("g", "gpt", layers=3, hidden=48, ffn=192, heads=12, vocab=101, tied=True)


@pytest.mark.parametrize(
    ("model", "tp"), [(GPT, tp) for tp in (1, 2, 3, 4, 6, 12)] + [(LLAMA, tp) for tp in (1, 2, 4, 12)]
)
def test_cuts_cover_each_tensor_once_or_replicate_whole_heads(model: ModelSpec, tp: int) -> None:
    for tensor in logical_tensors(model, 16):
        if tensor.tp_dim is None:
            assert tensor.local_shape(tp, tp - 1) == tensor.shape
            continue
        held = np.zeros(tensor.shape[tensor.tp_dim], dtype=int)
        for rank in range(tp):
            start, stop = tensor.bounds(tp, rank)
            assert start % tensor.tp_unit == 0 == stop % tensor.tp_unit
            held[start:stop] += 1
        copies = max(1, tp // (tensor.shape[tensor.tp_dim] // tensor.tp_unit)) if tensor.shared_units else 1
        assert (held == copies).all(), tensor.name


def test_query_heads_find_their_key_value_head_on_the_same_rank_b34() -> None:
    """8 query and 2 (or 1) key/value heads over 4 ranks: rank r's queries use exactly the head that it holds."""
    for kv_heads in (1, 2):
        model = ModelSpec("m", "llama", layers=1, hidden=64, ffn=64, heads=8, kv_heads=kv_heads, vocab=32)
        tensors = {t.name: t for t in logical_tensors(model)}
        for rank in range(4):
            q0, q1 = (row // model.head_dim for row in tensors["layers.0.attention.q.weight"].bounds(4, rank))
            k0, k1 = (row // model.head_dim for row in tensors["layers.0.attention.k.weight"].bounds(4, rank))
            assert {q * kv_heads // model.heads for q in range(q0, q1)} == set(range(k0, k1))


def test_stages_hold_each_layer_once_and_tied_embeddings_at_both_ends_b12_b15() -> None:
    bounds = Layout(pp=3).chunk_bounds(GPT)
    for tensor in logical_tensors(GPT, 16):
        stages = [s for s, (first, last) in enumerate(bounds) if on_stage(GPT, tensor, first, last)]
        assert stages == {"embedding.weight": [0, 2], "positions.weight": [0]}.get(
            tensor.name, [tensor.layer] if tensor.layer is not None else [2]
        )
    assert all(on_stage(GPT, t, 0, 3) for t in logical_tensors(GPT, 16))


def test_published_parameter_counts() -> None:
    llama7 = ModelSpec("llama-2-7b", "llama", layers=32, hidden=4096, ffn=11008, heads=32, vocab=32000)
    llama70 = ModelSpec("llama-2-70b", "llama", layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, vocab=32000)
    gpt2 = ModelSpec(
        "gpt2", "gpt", layers=12, hidden=768, ffn=3072, heads=12, vocab=50257, max_positions=1024, tied=True
    )
    assert num_parameters(llama7) == 6_738_415_616
    assert num_parameters(llama70) == 68_976_648_192
    assert num_parameters(gpt2) == 124_439_808
