"""B51: nothing is missing from the peak (states, update, communicators, context), and what is offered fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from suika.core.layout import Layout
from suika.core.model import Lora
from suika.core.presets import preset
from suika.core.tensors import num_parameters, trained_share
from suika.estimate.cases import parse_cases
from suika.estimate.columns import LayoutColumns
from suika.estimate.evaluate import evaluate
from suika.estimate.memory import memory
from suika.estimate.predict import estimate_step, setting
from suika.estimate.table import read_rows
from suika.plan.layouts import MEGATRON
from suika.plan.ranking import rank_layouts

LLAMA = preset("llama2-7b")
JOB = {"global_batch": 64, "sequence_length": 4096}


def parts(layout: Layout, device: str = "H100", precision: str = "bf16") -> dict[str, int]:
    e = estimate_step(LLAMA, layout, device, precision=precision, **JOB)  # type: ignore[arg-type]
    return dict(e.memory_parts_bytes)


def test_every_part_is_listed_apart() -> None:
    named = parts(Layout(tp=2, dp=4))
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "update", "communicators", "context"):
        assert named[part] > 0, part


def test_states_follow_from_the_parameters() -> None:
    named, n = parts(Layout()), num_parameters(LLAMA)
    assert named["weights"] == pytest.approx(2 * n, rel=0.01)
    assert named["gradients"] == pytest.approx(4 * n, rel=0.01)
    assert named["optimizer"] == pytest.approx(12 * n, rel=0.01)
    sharded = parts(Layout(dp=8))
    assert sharded["optimizer"] == pytest.approx(named["optimizer"] / 8, rel=0.01)
    full = parts(Layout(), precision="fp32")
    assert full["optimizer"] == pytest.approx(8 * n, rel=0.01)


def test_what_is_frozen_has_no_gradients_and_no_optimizer_state() -> None:
    """Half of the layers; then everything but adapters. A step takes less time, too."""
    whole = estimate_step(LLAMA, Layout(), "H100", **JOB)  # type: ignore[arg-type]
    last = whole.step_s
    for changes, share in (
        ({"frozen": ("layers.[0-9].*", "layers.1[0-5].*")}, 0.52),
        ({"lora": Lora(8)}, 0.0006),
    ):
        some = estimate_step(replace(LLAMA, **changes), Layout(), "H100", **JOB)  # type: ignore[arg-type]
        assert trained_share(replace(LLAMA, **changes)) == pytest.approx(share, rel=0.05)  # type: ignore[arg-type]
        for part in ("gradients", "optimizer"):
            before, after = dict(whole.memory_parts_bytes)[part], dict(some.memory_parts_bytes)[part]
            assert after == pytest.approx(share * before, rel=0.05)
        assert some.step_s < last
        last = some.step_s


def test_each_group_costs_a_communicator() -> None:
    layouts = [Layout(), Layout(dp=2), Layout(tp=2, dp=2), Layout(tp=2, pp=2, dp=2), Layout(tp=2, pp=2, dp=2, cp=2)]
    found = [parts(layout)["communicators"] for layout in layouts]
    assert found == sorted(found)
    assert found[-1] - found[0] == pytest.approx(4 * 0.3e9)


def test_activations_follow_micro_batches_in_flight() -> None:
    first = parts(Layout(pp=4))["activations"]
    assert parts(Layout(pp=4, micro_batch=2))["activations"] == pytest.approx(2 * first, rel=0.01)
    assert parts(Layout(pp=4, recompute="full"))["activations"] < 0.3 * first
    # One stage of four holds a quarter of the layers, four times: as much as no pipeline at all.
    assert first == pytest.approx(parts(Layout())["activations"], rel=0.05)


def test_uneven_stages_are_seen() -> None:
    s = setting(LLAMA, "H100", **JOB)  # type: ignore[arg-type]
    even, front = Layout(pp=4), Layout(pp=4, layers_per_stage=(14, 6, 6, 6))
    peaks = [float(memory(s.grid(LayoutColumns.of([layout], LLAMA))).peak[0]) for layout in (even, front)]
    assert peaks[1] > 1.3 * peaks[0]


def test_only_plans_whose_p90_fits_are_offered() -> None:
    s = setting(preset("llama2-70b"), "H100", global_batch=256, sequence_length=4096)
    ranking = rank_layouts(s, 64, MEGATRON, top=20)
    assert ranking.plans
    assert ranking.rejected
    assert all(plan.estimate.peak_p90_bytes <= 80e9 for plan in ranking.plans)
    assert all(plan.estimate.peak_p90_bytes > 80e9 for plan in ranking.rejected)
    assert all("GB" in plan.why for plan in ranking.rejected)


def test_measured_peaks(shared_data: Path) -> None:
    cases, skipped = parse_cases(read_rows(shared_data / "throughput" / "measured_dev.csv.gz"))
    cold = {f["source"]: f for f in evaluate(cases, skipped)["families"] if f["gpus_bucket"] == "all"}
    assert cold["SimuMax-B200"]["memory_n"] == 31
    assert cold["SimuMax-B200"]["memory_median_ape"] <= 1.5
    assert cold["SimuMax-B200"]["memory_p90_ape"] <= 5
    assert cold["Galvatron-profile"]["memory_n"] == 25
    assert np.isfinite(cold["Galvatron-profile"]["memory_p90_ape"])
