"""CPU devices: what a core does one after the other adds up, and the constants are found again from what they make."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from suika.bench.estimate_cpu import CHANGES, JOB, LAYOUTS, LENGTH, MODEL, OF_JOBS, OF_SHARDS, fit_jobs, fit_shards
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.estimate.columns import LayoutColumns
from suika.estimate.grid import Grid
from suika.estimate.predict import Setting, setting
from suika.estimate.recipe import BUILT_IN
from suika.estimate.samples import predicted_parts
from suika.estimate.step import price


def spec(batch: int = 16, **model: object) -> JobSpec:
    body = {"model": {**MODEL, **model}, "global_batch": batch, "sequence_length": LENGTH}
    return parse_job({"name": "x", "data": "/x", "precision": "fp32", "steps": 10, **body})


def setting_of(s: JobSpec, recipe=BUILT_IN) -> Setting:  # type: ignore[no-untyped-def]
    fixed = {"precision": s.precision, "recipe": recipe}
    return setting(s.model, "cpu", global_batch=s.global_batch, sequence_length=s.sequence_length, **fixed)


def parts(layout: str, s: JobSpec | None = None, recipe=BUILT_IN) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Seconds of all ranks together."""
    s = s or spec()
    x = Layout.parse(layout)
    found = predicted_parts(setting_of(s, recipe), LayoutColumns.of([x], s.model), {})
    return {name: x.num_ranks * float(seconds[0]) for name, seconds in found.items()}


def test_small_micro_batches_pay_for_the_weights_more_often() -> None:
    one, four = parts("dp=4"), parts("dp=4,micro_batch=4")
    assert one["compute"] > 1.2 * four["compute"]


def test_autograd_adds_gradients_up_and_fused_products_do_not() -> None:
    assert parts("dp=4")["compute"] > 1.03 * parts("dp=4", recipe=replace(BUILT_IN, accumulate_bytes=0.0))["compute"]


def test_meetings_take_a_core_inside_of_compute_too() -> None:
    """Two ranks that have half of each layer compute more than half as long each."""
    assert parts("tp=2,dp=4")["compute"] > 1.4 * parts("dp=8")["compute"]
    assert parts("dp=8")["tp"] == 0


def test_a_message_for_every_peer_and_large_sums_in_two_rounds() -> None:
    """80 positions of 160 values are 51 KB: above 64 KB from two of them on; two ranks never need two rounds."""
    micro_batches = {size: 16 / size for size in (1, 2)}
    each = {
        (tp, size): parts(f"tp={tp},dp=1,micro_batch={size}")["tp"] / tp / micro_batches[size]
        for tp, size in itertools.product((2, 4), (1, 2))
    }
    assert 2.5 < each[4, 1] / each[2, 1] < 3.5
    assert each[4, 2] / each[4, 1] > 1.7
    assert each[2, 2] / each[2, 1] < 1.3


def test_an_update_has_a_price_per_layer() -> None:
    small, large = (parts("dp=8", spec(layers=layers))["optimizer"] for layers in (2, 8))
    assert large > 2 * small


def changed(grid: Grid, truth: dict[str, float]) -> Grid:
    return replace(grid, **{name: times * getattr(grid, name) for name, times in truth.items()})


def test_constants_of_shards_are_found_again() -> None:
    specs = [spec(2 * size, **change) for change, size in itertools.product(CHANGES, (1, 2, 4))]
    grids = [setting_of(s).grid(LayoutColumns.of([Layout(micro_batch=s.global_batch // 2)], s.model)) for s in specs]
    grid = Grid.stack(grids)
    truth = dict(zip(OF_SHARDS, (0.8, 1.3, 1.2, 1.5, 0.7, 0.8), strict=True))
    seconds = price(changed(grid, truth)).work_parts_s["compute"] / 2
    found = fit_shards(specs, seconds)
    assert found.rms < 0.02
    for name in ("gemm", "host_layer_s", "memory_bytes_per_s"):
        assert found.values[name] == pytest.approx(truth[name] * float(getattr(grid, name)[0]), rel=0.15), name


def test_constants_of_jobs_are_found_again_however_slow_the_cores_are() -> None:
    job = parse_job({"name": "x", "data": "/x", "precision": "fp32", "steps": 10, **JOB})
    s = setting_of(job)
    truth = dict(zip(OF_JOBS, (1.2, 1.4, 0.7, 1.3, 0.8), strict=True))
    jobs = []
    for text in LAYOUTS:
        grid = changed(s.grid(LayoutColumns.of([Layout.parse(text)], job.model)), truth)
        found = price(grid).work_parts_s
        jobs.append((job, Layout.parse(text), {part: 1.3 * float(np.ravel(v)[0]) for part, v in found.items()}))
    shipped = s.grid(LayoutColumns.of([Layout()], job.model))
    known = {name: float(np.ravel(getattr(shipped, name))[0]) for name in OF_SHARDS}
    found = fit_jobs(jobs, known)
    assert found.rms < 0.03
    for name in ("host_tp", "bus_latency_s"):
        assert found.values[name] == pytest.approx(
            truth[name] * float(np.ravel(getattr(shipped, name))[0]), rel=0.15
        ), name
