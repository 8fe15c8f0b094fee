"""Copies of a parameter stay equal to the last bit: tied embeddings, replicated norms, shared key/value heads."""

from __future__ import annotations

import numpy as np
import pytest
from logical import merge, same_bits, train_from
from twins import gpt, job, llama, max_loss_difference, twin

from suika.core.layout import Layout
from suika.reshard.state import StateKey, buffer_specs


def test_a_tied_embedding_moves_through_pipelines_as_one_tensor() -> None:
    """B12: pp 1 > 2 > 3 > 1, 5 steps each. `merge` compares the copies of first and last stage, moments included."""
    spec = job(gpt(layers=6), "fp32", steps=20)
    state, records, results = None, None, []
    for pp in (1, 2, 3, 1):
        state, records, some = train_from(spec, Layout(pp=pp, micro_batch=2), 5, state, records)
        results += some
    assert max_loss_difference(results, twin(spec, 20)) < 1e-5
    assert state is not None
    assert StateKey("head.weight", "weight") not in state  # one embedding, one optimizer state


@pytest.mark.parametrize("dp", [2, 3])
def test_tied_copies_stay_equal_when_their_buckets_are_cut_at_different_places(dp: int) -> None:
    """The first stage holds it behind nothing, the last behind the final norm: every slice border differs."""
    spec = job(gpt(layers=2, vocab=259), "fp32")
    state, _, _ = train_from(spec, Layout(pp=2, dp=dp), 5)
    assert np.isfinite(state[StateKey("embedding.weight", "m")]).all()


def test_merging_unequal_copies_is_refused() -> None:
    spec, layout = job(gpt(layers=2), "fp32"), Layout(pp=2)
    ranks = [
        {name: np.zeros(shape, np.float32) for name, (shape, _) in _specs(spec, layout, rank).items()}
        for rank in (0, 1)
    ]
    merge(spec, layout, ranks)
    ranks[1]["weight/embedding.weight"][3, 4] += 1e-3
    with pytest.raises(ValueError, match=r"embedding\.weight.*rank 1 and ranks \[0\]"):
        merge(spec, layout, ranks)


def _specs(spec, layout, rank):  # type: ignore[no-untyped-def]
    return buffer_specs(spec.model, layout, spec.sequence_length, spec.precision, rank)


@pytest.mark.parametrize("make", [gpt, llama])
def test_replicated_norms_do_not_drift_with_sequence_parallelism(make) -> None:  # type: ignore[no-untyped-def]
    """B27: 50 steps on sequence shards; `merge` compares every replicated tensor of the two ranks."""
    spec = job(make(layers=1), "fp32", steps=50)
    layout = Layout(tp=2, micro_batch=8, sequence_parallel=True)
    state, _, results = train_from(spec, layout, 50)
    norm = state[StateKey("layers.0.mlp_norm.weight", "weight")]
    assert (norm != 1).any()  # it did train
    assert abs(results[-1].loss - twin(spec, 50)[-1].loss) < 1e-4


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_fewer_key_value_heads_than_tp_ranks(kv_heads: int, sequence_parallel: bool) -> None:
    """B34: 8 query heads on tp 4 > 1 > 2. Copies of a head stay equal, their gradients count once."""
    model = llama(layers=1, heads=8, kv_heads=kv_heads, qkv_bias=True)
    spec = job(model, steps=6)
    state, records, results = None, None, []
    for tp in (4, 1, 2):
        layout = Layout(tp=tp, micro_batch=8, sequence_parallel=sequence_parallel)
        state, records, some = train_from(spec, layout, 2, state, records)
        results += some
    reference = twin(spec, 6)
    assert max_loss_difference(results, reference) < 1e-9
    for step, other in zip(results, reference, strict=True):
        assert step.grad_norm == pytest.approx(other.grad_norm, abs=1e-9)
    assert state is not None
    assert state[StateKey("layers.0.attention.k.weight", "weight")].shape == (kv_heads * model.head_dim, model.hidden)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_detour_through_another_layout_loses_no_bit_of_the_state(precision: str) -> None:
    spec = job(llama(layers=2, kv_heads=1), precision)
    state, records, _ = train_from(spec, Layout(pp=2), 2)
    for layout in (Layout(tp=2, dp=2), Layout(dp=3, zero_buckets="stage"), Layout(tp=4)):
        moved, after, _ = train_from(spec, layout, 0, state, records)
        assert same_bits(moved, state)
        assert after == records
