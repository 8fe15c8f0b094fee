"""Every enumerated layout is legal, none is missing, and the columns say what the layouts say."""

from __future__ import annotations

from dataclasses import fields
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.core.errors import SpecError
from suika.core.job import JobSpec
from suika.core.layout import Layout, check_layout, micro_batch_shares
from suika.core.model import ModelSpec
from suika.estimate.columns import LayoutColumns
from suika.plan.layouts import MEGATRON, Space, layout_columns, legal_layouts, legal_tps
from suika.train.limits import check_runnable

LLAMA = ModelSpec("llama", "llama", 6, 48, 96, 12, 256, kv_heads=4)
MOE = ModelSpec("moe", "llama", 4, 64, 128, 8, 256, experts=8, experts_per_token=2)


def legal(layout: Layout, model: ModelSpec, global_batch: int) -> bool:
    try:
        check_layout(layout, model, global_batch, 64)
    except SpecError:
        return False
    return True


@pytest.mark.parametrize("num_devices", [1, 2, 3, 6, 8, 12])
def test_enumeration_equals_brute_force(num_devices: int) -> None:
    space = Space(micro_batches=(1, 2, 3))
    degrees = range(1, num_devices + 1)
    wanted = {
        Layout(tp=tp, pp=pp, dp=num_devices // (tp * pp), micro_batch=b)
        for tp, pp, b in product(degrees, degrees, space.micro_batches)
        if num_devices % (tp * pp) == 0 and tp <= 8
    }
    wanted = {layout for layout in wanted if legal(layout, LLAMA, 24)}
    found = legal_layouts(LLAMA, num_devices, global_batch=24, sequence_length=64, space=space)
    assert len(found) == len(set(found))
    assert set(found) == wanted


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([LLAMA, MOE]), st.integers(1, 64), st.sampled_from([8, 12, 24, 64]))
def test_every_layout_of_the_widest_space_is_legal(model: ModelSpec, num_devices: int, global_batch: int) -> None:
    for layout in legal_layouts(model, num_devices, global_batch=global_batch, sequence_length=64, space=MEGATRON):
        check_layout(layout, model, global_batch, 64)
        assert layout.num_ranks == num_devices


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([LLAMA, MOE]), st.integers(1, 32), st.sampled_from([8, 12, 24, 64]), st.sampled_from([64, 8192]))
def test_what_is_offered_to_jobs_is_what_the_trainer_runs(
    model: ModelSpec, num_devices: int, global_batch: int, sequence_length: int
) -> None:
    fields = {"name": "m", "model": model, "data": "d", "steps": 1}
    spec = JobSpec(**fields, global_batch=global_batch, sequence_length=sequence_length)
    shape = {"global_batch": global_batch, "sequence_length": sequence_length}
    for layout in legal_layouts(model, num_devices, **shape):
        check_runnable(spec, layout)
    if num_devices in (2, 8) and global_batch % num_devices == 0:
        offered = legal_layouts(model, num_devices, **shape)
        assert max(layout.ep for layout in offered) == (num_devices if model is MOE else 1)
        assert max(layout.cp for layout in offered) == (2 if sequence_length == 8192 else 1)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([1, 2, 3]))
def test_columns_of_even_splits_agree_with_the_layouts(layers: int, pp: int, virtual_stages: int) -> None:
    if pp * virtual_stages > layers or (pp == 1 and virtual_stages > 1):
        return
    model = ModelSpec("m", "gpt", layers, 64, 256, 4, 256)
    of = LayoutColumns.of([Layout(pp=pp, virtual_stages=virtual_stages)], model)
    even = LayoutColumns.even(layers, of.tp, of.pp, of.dp, virtual_stages=of.virtual_stages)
    for field in fields(LayoutColumns):
        assert np.array_equal(getattr(of, field.name), getattr(even, field.name)), field.name


def test_tensor_parallel_groups_stay_in_a_node_and_cut_every_width() -> None:
    assert legal_tps(LLAMA, 8) == [1, 2, 4]  # 3 and 6 cut the heads but not the four key/value heads
    columns = layout_columns(LLAMA, [8], global_batch=24, sequence_length=64, devices_per_node=2)
    assert columns.tp.max() == 2


def test_no_layout_is_an_empty_answer_not_an_error() -> None:
    assert legal_layouts(LLAMA, 7, global_batch=4, sequence_length=64) == []


def test_seven_free_devices_and_a_batch_of_256_b22() -> None:
    """Never 252 samples: every layout on offer shares out exactly the global batch, evenly or not."""
    model = ModelSpec("m", "llama", layers=7, hidden=64, ffn=128, heads=4, vocab=256)
    offered = [
        layout for num in range(1, 8) for layout in legal_layouts(model, num, global_batch=256, sequence_length=64)
    ]
    assert {layout.micro_batch for layout in offered} >= {1, 2, 4}
    assert {layout.dp for layout in offered} >= {4, 7}
    for layout in offered:
        assert sum(micro_batch_shares(256, layout.micro_batch, layout.dp)) * layout.micro_batch == 256
        check_layout(layout, model, 256, 64)
