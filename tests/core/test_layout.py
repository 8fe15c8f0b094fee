"""Layouts: every refusal shows its arithmetic; layers and samples are shared out exactly (B15, B22)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from suika.core.errors import SpecError
from suika.core.layout import Layout, check_layout, even_split, micro_batch_shares
from suika.core.model import ModelSpec

MODEL = ModelSpec("m", "llama", layers=6, hidden=48, ffn=96, heads=12, kv_heads=4, vocab=257)


def test_every_split_is_contiguous_exact_and_even_b15() -> None:
    for layers in range(1, 81):
        for chunks in range(1, layers + 1):
            split = even_split(layers, chunks)
            assert sum(split) == layers
            assert max(split) - min(split) <= 1
            bounds = Layout(pp=chunks).chunk_bounds(
                ModelSpec("m", "gpt", layers=layers, hidden=8, ffn=8, heads=2, vocab=9)
            )
            assert [layer for first, last in bounds for layer in range(first, last)] == list(range(layers))


def test_fewer_layers_than_stages_is_refused_b15() -> None:
    with pytest.raises(SpecError, match=r"layers\(3\) < pipeline chunks\(4\)"):
        even_split(3, 4)


@given(st.integers(1, 500), st.integers(1, 8), st.integers(1, 40))
def test_shares_always_sum_to_the_global_batch_b22(num_micro: int, micro_batch: int, dp: int) -> None:
    shares = micro_batch_shares(num_micro * micro_batch, micro_batch, dp)
    assert sum(shares) * micro_batch == num_micro * micro_batch
    assert len(shares) == dp
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(tp=5), r"heads\(12\) % tp\(5\) != 0"),
        (Layout(tp=3), r"kv_heads\(4\) and tp\(3\) divide neither way"),
        (Layout(pp=7), r"layers\(6\) < pipeline chunks\(7\)"),
        (Layout(pp=2, layers_per_stage=(2, 3)), r"sum\(5\) != layers\(6\)"),
        (Layout(micro_batch=5), r"global_batch\(16\) % micro_batch\(5\) != 0"),
        (Layout(dp=8, pp=3), r"2 micro-batches for pp\(3\)"),
        (Layout(ep=2), "no experts"),
        (Layout(cp=2), r"sequence_length\(30\) % \(2 x cp\(2\)\)"),
        (Layout(tp=4, cp=3, sequence_parallel=True), r"sequence_length\(30\) % tp\(4\) x cp\(3\)"),
        (Layout(tp=4, sequence_parallel=True), r"sequence_length\(30\) % tp\(4\)"),
    ],
)
def test_impossible_layouts_are_refused_with_the_arithmetic(layout: Layout, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_layout(layout, MODEL, global_batch=16, sequence_length=30)


def test_possible_layouts_pass() -> None:
    check_layout(Layout(tp=2, pp=2, dp=3), MODEL, global_batch=16, sequence_length=30)
    check_layout(Layout(tp=12), MODEL, global_batch=16, sequence_length=30)  # key/value heads are replicated


@pytest.mark.parametrize(
    "bad",
    [
        {"tp": 0},
        {"tp": True},
        {"pp": 1.5},
        {"dp": 10**9},
        {"zero": 4},
        {"zero": True},
        {"recompute": "half"},
        {"sequence_parallel": "yes"},
        {"layers_per_stage": 3},
        {"pp": 2, "layers_per_stage": ["a", "b"]},
        {"tpp": 2},
        {1: 2, "tpp": 2},
    ],
)
def test_bad_fields_are_named(bad: dict) -> None:
    with pytest.raises(SpecError, match=r"layout"):
        Layout.from_dict(bad)


def test_text_and_dict_round_trip() -> None:
    layout = Layout.parse("tp=2,pp=2,dp=1,layers_per_stage=4:2,recompute=full,sequence_parallel=true")
    assert layout == Layout(tp=2, pp=2, layers_per_stage=(4, 2), recompute="full", sequence_parallel=True)
    assert Layout.from_dict(layout.to_dict()) == layout
    assert str(layout) == "tp2 pp2 dp1 layers[4,2] full-recompute"
    for text in ("tp", "tp=x", "tp=2;pp=2", "wat=2"):
        with pytest.raises(SpecError):
            Layout.parse(text)


def test_virtual_stages_alternate() -> None:
    layout = Layout(pp=2, virtual_stages=2, layers_per_stage=(1, 2, 2, 1))
    assert layout.stage_chunks(MODEL, 0) == ((0, 1), (3, 5))
    assert layout.stage_chunks(MODEL, 1) == ((1, 3), (5, 6))
