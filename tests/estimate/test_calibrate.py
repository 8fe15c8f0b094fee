"""Calibration moves towards what was measured, says how sure it is, and survives a round trip. B71: dirty series."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.presets import preset
from suika.core.sample import CollectiveSample, StepSample
from suika.estimate.calibrate import TERMS, Calibration, prior_covariance, slopes, updated
from suika.estimate.columns import LayoutColumns
from suika.estimate.predict import estimate_layout, setting
from suika.estimate.recipe import BUILT_IN
from suika.estimate.samples import calibrate, predicted_parts, steady, steady_step

S = setting(preset("llama2-7b"), "H100", global_batch=128, sequence_length=4096)
LAYOUT = Layout(tp=2, pp=2, dp=4)


def grid(layout: Layout = LAYOUT):  # type: ignore[no-untyped-def]
    return S.grid(LayoutColumns.of([layout], S.model))


def test_slopes_are_the_shares_of_the_step() -> None:
    step, shares = slopes(grid())
    assert shares.shape == (1, len(TERMS))
    assert shares[0, :-1].sum() == pytest.approx(1.0, abs=0.06)  # hidden gradients count against what hides them
    assert shares[0, -1] == 1
    assert step[0] == pytest.approx(estimate_layout(S, LAYOUT).step_s, rel=0.02)


@settings(max_examples=10, deadline=None)
@given(st.floats(0.8, 1.25))
def test_a_measured_step_is_believed_in_part_and_more_each_time(factor: float) -> None:
    known = Calibration.prior("H100", "job")
    measured = factor * float(slopes(grid())[0][0])
    misses = []
    for _ in range(4):
        misses.append(abs(math.log(measured / slopes(grid(), known.log_factors)[0][0])))
        known = known.observe_step(grid(), measured)
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(misses))
    assert misses[-1] <= 0.25 * misses[0] + 1e-6
    assert np.trace(known.covariance) < np.trace(prior_covariance())
    assert known.version == 4


def test_other_layouts_gain_from_it_and_are_less_sure() -> None:
    slow = dict.fromkeys(("gemm", "tp"), 0.15)
    known = Calibration.prior("H100").observe_step(grid(), float(slopes(grid(), slow)[0][0]))
    other = Layout(tp=4, pp=1, dp=4)
    truth = float(slopes(grid(other), slow)[0][0])
    cold = abs(math.log(slopes(grid(other))[0][0] / truth))
    warm = abs(math.log(slopes(grid(other), known.log_factors)[0][0] / truth))
    assert warm < 0.6 * cold
    own, others = (known.sigma(slopes(grid(layout))[1])[0] for layout in (LAYOUT, Layout(tp=8, dp=2)))
    assert own < others < Calibration.prior("H100").sigma(slopes(grid())[1])[0] * 1.5


def test_like_layouts_share_more_of_what_the_form_gets_wrong() -> None:
    """Three rows with the same shares: the measured one, a neighbour, and one three doublings away."""
    shares = np.repeat(slopes(grid())[1], 3, axis=0)
    places = np.array([[0.0], [0.5], [3.0]])
    expected, variance = updated([0], np.array([0.2, np.nan, np.nan]), shares, places, np.array(["", "", ""]))
    assert 0.2 > expected[0] >= expected[1] > expected[2] > 0
    assert variance[0] < variance[1] < variance[2]


def test_rows_of_another_software_version_learn_less_and_are_less_sure() -> None:
    """Two repeats of the measured layout: by the same version and by another."""
    shares = np.repeat(slopes(grid())[1], 3, axis=0)
    places, versions = np.zeros((3, 1)), np.array(["25.11", "25.11", "26.04"])
    expected, variance = updated([0], np.array([0.2, np.nan, np.nan]), shares, places, versions)
    assert expected[1] == pytest.approx(expected[0])
    assert 0.6 * expected[1] < expected[2] < 0.95 * expected[1]
    assert variance[2] > variance[1]


def test_one_wild_measurement_is_doubted() -> None:
    known = Calibration.prior("H100").observe_step(grid(), 50 * float(slopes(grid())[0][0]))
    assert slopes(grid(), known.log_factors)[0][0] < 1.5 * slopes(grid())[0][0]
    with pytest.raises(SpecError):
        Calibration.prior("H100").observe(np.ones(len(TERMS)), math.nan, 0.1)


def test_round_trip_and_versions() -> None:
    known = Calibration.prior("H100", "job-1").observe_class("tp", 0.3, 0.05)
    again = Calibration.from_dict(json.loads(json.dumps(known.to_dict())))
    assert (again.log_factors, again.version, again.job) == (known.log_factors, 1, "job-1")
    with pytest.raises(SpecError, match="another version"):
        Calibration.from_dict({**known.to_dict(), "format": 99})
    row = next(row for row in known.table() if row["op_class"] == "tp")
    assert row["p10"] < row["factor"] < row["p90"]


def series() -> list[StepSample]:
    """B71: three first steps 50x slow, a straggler, a snapshot, an evaluation and a move inside."""
    rng = np.random.default_rng(3)
    base = StepSample("job", 1, 0, 0, 0.1)
    found = [replace(base, step=i, step_s=5.0, kind="first") for i in range(3)]
    found += [replace(base, step=i, step_s=0.1 * (1 + 0.02 * rng.standard_normal())) for i in range(3, 60)]
    found[20] = replace(found[20], step_s=1.0)
    for i, kind in ((30, "snapshot"), (40, "evaluation"), (50, "move")):
        found[i] = replace(found[i], step_s=0.6, kind=kind)
    return found


def test_dirty_series_give_the_steady_step_with_its_spread() -> None:
    found = steady_step(series())
    assert found is not None
    assert found.step_s == pytest.approx(0.1, rel=0.05)
    assert 0 < found.spread_s < 0.005
    assert found.num_samples >= 50
    assert {s.kind for s in steady(series())} == {"steady"}


def test_unmarked_first_steps_are_dropped_too() -> None:
    found = steady_step(replace(s, kind="steady") for s in series())
    assert found is not None
    assert found.step_s == pytest.approx(0.1, rel=0.05)


def test_tokens_are_counted_once_whatever_shares_them() -> None:
    found = steady_step(series())
    assert found is not None
    assert found.tokens_per_s(8, 64) == pytest.approx(8 * 64 / found.step_s)  # no tp, no dp in it


def test_times_that_are_no_times_are_left_out() -> None:
    bad = [replace(series()[5], step_s=t) for t in (math.nan, -1.0, 0.0, math.inf)]
    assert steady_step(bad) is None
    assert steady([]) == []


def test_component_samples_find_each_class() -> None:
    """Samples of a machine whose arithmetic is 1.5x and whose tp messages are 3x slower than the prior."""
    s = setting(
        preset("gpt3-125m"), "cpu", global_batch=16, sequence_length=128, precision="fp32", recipe=BUILT_IN, cores=2
    )
    layout = Layout(tp=2, pp=2, dp=2)
    columns = LayoutColumns.of([layout], s.model)
    truth = {"gemm": 0.4, "attention": 0.4, "vector": 0.4, "host": 0.4, "tp": 1.1}
    parts = {k: float(v[0]) for k, v in predicted_parts(s, columns, truth).items()}
    message = CollectiveSample("tp", "swap", 1024, 2, 1e-4)
    samples = [
        StepSample(
            "j", 1, step, rank, 1.0, {"compute": parts["compute"], "tp": parts["tp"], "dp": parts["dp"]}, (message,)
        )
        for step in range(8)
        for rank in range(8)
    ]
    known = calibrate(Calibration.prior("cpu", "j"), s, layout, samples)
    for other in (Layout(dp=8), Layout(tp=4, dp=2), Layout(pp=4, dp=2), Layout(tp=2, dp=2, micro_batch=2)):
        columns = LayoutColumns.of([other], s.model)
        wanted = sum(float(v[0]) for v in predicted_parts(s, columns, truth).values())
        found = sum(float(v[0]) for v in predicted_parts(s, columns, known.log_factors).values())
        cold = sum(float(v[0]) for v in predicted_parts(s, columns, {}).values())
        assert abs(found / wanted - 1) < 0.12 < abs(cold / wanted - 1), other
    assert StepSample.from_dict(samples[0].to_dict()) == samples[0]
