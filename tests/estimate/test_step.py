"""What must hold of every price: parts add up, more work costs more, overlap and sharding never hurt the other way."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.core.layout import Layout
from suika.core.presets import preset
from suika.estimate.columns import LayoutColumns
from suika.estimate.comm import all_reduce_s
from suika.estimate.factors import OP_CLASSES
from suika.estimate.grid import Grid
from suika.estimate.predict import Setting, estimate_layout, estimate_many, estimate_step, setting, step_s_of
from suika.estimate.recipe import DEFAULT, Recipe
from suika.estimate.step import price
from suika.plan.layouts import MEGATRON, layout_columns

LLAMA = preset("llama2-7b")


def step_s(layout: Layout, device: str = "H100", recipe: Recipe = DEFAULT, **more: object) -> float:
    job: dict[str, object] = {"global_batch": 128, "sequence_length": 4096, **more}
    return estimate_step(LLAMA, layout, device, recipe=recipe, **job).step_s  # type: ignore[arg-type]


def test_parts_add_up_for_every_legal_layout() -> None:
    s = setting(LLAMA, "H100", global_batch=128, sequence_length=4096)
    columns = layout_columns(LLAMA, [16, 64], global_batch=128, sequence_length=4096, space=MEGATRON)
    p, m = estimate_many(s, columns)
    assert np.allclose(sum(p.parts_s.values()), p.step_s)
    assert np.all(np.isfinite(p.step_s) & (p.step_s > 0))
    assert np.allclose(sum(m.parts.values()), m.peak)
    assert np.all(m.peak < m.p90)
    for name, part in p.parts_s.items():
        assert np.all(part > -1e-9), name


def test_one_layout_equals_its_row_unless_the_pipeline_is_uneven() -> None:
    s = setting(LLAMA, "A100", global_batch=128, sequence_length=4096)
    for layout in (Layout(dp=8), Layout(tp=4, dp=2), Layout(tp=2, pp=4, micro_batch=2)):
        row = float(estimate_many(s, LayoutColumns.of([layout], LLAMA))[0].step_s[0])
        assert estimate_layout(s, layout).step_s == pytest.approx(row, rel=0.02)
    even, uneven = Layout(pp=4), Layout(pp=4, layers_per_stage=(5, 11, 11, 5))
    assert estimate_layout(s, uneven).step_s > 1.2 * estimate_layout(s, even).step_s
    assert step_s_of(s, uneven) == estimate_layout(s, uneven).step_s  # to the bit


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_more_work_costs_more(tp: int, pp: int, dp: int, micro_batch: int) -> None:
    layout = Layout(tp=tp, pp=pp, dp=dp, micro_batch=micro_batch)
    base = step_s(layout)
    assert step_s(layout, global_batch=256) > base
    assert step_s(layout, sequence_length=8192) > base
    assert step_s(replace(layout, recompute="full")) > base
    assert step_s(layout, "A100") > base
    assert step_s(layout, precision="fp8") < base


def test_each_factor_moves_its_own_class_only() -> None:
    s = setting(preset("qwen3-30b-a3b"), "H100", global_batch=256, sequence_length=4096, precision="fp8")
    layout = Layout(tp=2, pp=2, dp=8, cp=2, ep=8)
    grid = s.grid(LayoutColumns.of([layout], s.model))
    base = float(price(grid).step_s[0])
    for name in OP_CLASSES:
        assert float(price(grid, {name: 0.1}).step_s[0]) >= base, name
    everything = float(price(grid, dict.fromkeys(OP_CLASSES, 0.1)).step_s[0])
    assert everything == pytest.approx(base * np.exp(0.1), rel=0.02)


def test_the_network_is_slower_than_the_domain() -> None:
    inside = step_s(Layout(tp=8), devices_per_node=8)
    across = step_s(Layout(tp=8), devices_per_node=4)
    assert across > 1.2 * inside


def test_groups_that_share_adapters_gain_nothing_from_a_second_member_in_a_node() -> None:
    """Messages long enough that only bandwidth counts: groups of 8 with 1, 2, 4 members in each node of 8, and 64."""
    s = setting(LLAMA, "A100", global_batch=128, sequence_length=4096)
    own, shared = (replace(s, wiring=replace(s.wiring, devices_per_adapter=n)) for n in (1.0, 2.0))

    def seconds(s: Setting, size: float, members: float) -> float:
        grid = s.grid(LayoutColumns.of([Layout()], LLAMA))
        return float(all_reduce_s(grid, np.array(size), np.array(8 * size / members), np.array(1e12)))

    for members, gain in ((1.0, 1.0), (2.0, 1.0), (4.0, 2.0)):
        assert seconds(own, 8, 1.0) / seconds(own, 8, members) == pytest.approx(members, rel=0.01)
        assert seconds(shared, 8, 1.0) / seconds(shared, 8, members) == pytest.approx(gain, rel=0.01)
    assert seconds(shared, 64, 8.0) == seconds(own, 64, 8.0)  # a whole node has all adapters


def test_gradients_travel_faster_when_nothing_computes_beside_them() -> None:
    """A step of so few tokens, launched by graphs, that the last backward hides next to nothing."""

    def dp_s(*, overlap: bool) -> float:
        recipe = replace(DEFAULT, dp_overlap=overlap, cuda_graphs=True)
        job = {"global_batch": 64, "sequence_length": 16, "recipe": recipe}
        return estimate_step(LLAMA, Layout(dp=64), "H100", **job).parts_s["dp"]  # type: ignore[arg-type]

    assert 1.2 < dp_s(overlap=True) / dp_s(overlap=False) < 1.3


def test_an_unpadded_vocabulary_slows_the_head_by_how_its_rows_are_cut() -> None:
    def head_s(vocab: int, tp: int, *, pads: bool) -> float:
        model = replace(preset("gpt3-1.3b"), vocab=vocab)
        recipe = replace(DEFAULT, pads_vocabulary=pads, fused_loss=True)
        s = setting(model, "A100", global_batch=8, sequence_length=2048, recipe=recipe)
        return float(np.ravel(price(s.grid(LayoutColumns.of([Layout(tp=tp)], model))).head_forward_s)[0])

    assert head_s(50257, 1, pads=True) == pytest.approx(head_s(50304, 1, pads=True), rel=0.01)
    slowed = {tp: head_s(50257, tp, pads=False) / head_s(50257, tp, pads=True) for tp in (1, 2, 4, 8)}
    assert slowed[2] == 1  # 25,128 columns of 2 bytes are whole pieces of 16
    assert slowed[1] > slowed[8] > slowed[4] > 1.1
    assert head_s(50304, 1, pads=False) == head_s(50304, 1, pads=True)


def test_overlap_hides_gradients_and_interleaving_shrinks_the_bubble() -> None:
    layout = Layout(dp=64)
    assert step_s(layout) < step_s(layout, recipe=replace(DEFAULT, dp_overlap=False))
    plain = estimate_step(LLAMA, Layout(pp=8), "H100", global_batch=16, sequence_length=4096).parts_s["pp_bubble"]
    piped = Layout(pp=8, virtual_stages=4)
    assert estimate_step(LLAMA, piped, "H100", global_batch=16, sequence_length=4096).parts_s["pp_bubble"] < 0.4 * plain


def test_devices_that_share_cores_cannot_beat_their_cores() -> None:
    model = preset("gpt3-125m")
    job = {"global_batch": 16, "sequence_length": 128, "precision": "fp32"}
    alone = estimate_step(model, Layout(), "cpu", cores=2, **job).step_s  # type: ignore[arg-type]
    shared = estimate_step(model, Layout(dp=8), "cpu", cores=2, **job).step_s  # type: ignore[arg-type]
    own = estimate_step(model, Layout(dp=8), "cpu", **job).step_s  # type: ignore[arg-type]
    assert own < alone / 4
    assert shared > 0.45 * alone


def test_stacked_grids_price_like_single_ones() -> None:
    settings_ = [
        setting(preset(name), "H100", global_batch=64, sequence_length=2048) for name in ("gpt3-13b", "llama3-8b")
    ]
    layouts = [Layout(tp=2, dp=4), Layout(pp=4, dp=2)]
    grids = [s.grid(LayoutColumns.of([layout], s.model)) for s, layout in zip(settings_, layouts, strict=True)]
    both = price(Grid.stack(grids)).step_s
    assert both.tolist() == [float(price(g).step_s[0]) for g in grids]
