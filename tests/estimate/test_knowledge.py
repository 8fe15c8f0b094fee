"""What running jobs teach: news only where something changed, evidence counted once, and what others gain from it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.presets import preset
from suika.core.sample import StepSample
from suika.estimate.calibrate import Calibration
from suika.estimate.columns import LayoutColumns
from suika.estimate.knowledge import Known, Pool, Seen
from suika.estimate.predict import estimate_layout, setting
from suika.estimate.recipe import BUILT_IN
from suika.estimate.samples import predicted_parts

MODEL = preset("gpt3-125m")
S = setting(MODEL, "cpu", global_batch=16, sequence_length=128, precision="fp32", recipe=BUILT_IN)
HERE, THERE = Layout(tp=2, pp=2, dp=2).resolve(MODEL), Layout(dp=8).resolve(MODEL)
TRUTH = {"gemm": 0.4, "attention": 0.4, "vector": 0.4, "host": 0.4, "tp": 1.1}


def samples(layout: Layout, truth: dict[str, float], num: int = 8, noise: float = 0.0) -> list[StepSample]:
    """What a machine with these true log factors shows of `layout`."""
    rng = np.random.default_rng(7)
    parts = {k: float(v[0]) for k, v in predicted_parts(S, LayoutColumns.of([layout], MODEL), truth).items()}

    def one(step: int, rank: int) -> StepSample:
        op_s = {k: v * float(np.exp(noise * rng.standard_normal())) for k, v in parts.items()}
        return StepSample("j", 1, step, rank, 1.0, op_s)

    return [one(step, rank) for step in range(num) for rank in range(layout.num_ranks)]


def learnt(known: Known, layout: Layout, truth: dict[str, float], **more: float) -> Known:
    seen = Seen.of(Mesh(layout), 8, 16, samples(layout, truth, **more))  # type: ignore[arg-type]
    assert seen is not None
    return known.with_seen(seen, {8: S})


def start() -> Known:
    return Known.nothing(Calibration.prior("cpu"), "j")


def test_a_layout_is_news_once_and_again_when_its_times_change() -> None:
    first = Seen.of(Mesh(HERE), 8, 16, samples(HERE, TRUTH))
    assert first is not None
    assert start().news(first)
    known = start().with_seen(first, {8: S})
    again = Seen.of(Mesh(HERE), 8, 16, samples(HERE, TRUTH, num=12, noise=0.02))
    assert again is not None
    assert not known.news(again)
    slower = Seen.of(Mesh(HERE), 8, 16, samples(HERE, {k: v + 0.3 for k, v in TRUTH.items()}))
    assert slower is not None
    assert known.news(slower)
    assert Seen.of(Mesh(HERE), 8, 16, [replace(s, kind="move") for s in samples(HERE, TRUTH)]) is None


def test_other_layouts_are_predicted_from_one() -> None:
    known = learnt(start(), HERE, TRUTH)
    for other in (THERE, Layout(tp=4, dp=2).resolve(MODEL), Layout(pp=4, dp=2).resolve(MODEL)):
        columns = LayoutColumns.of([other], MODEL)
        true_s = sum(float(v[0]) for v in predicted_parts(S, columns, TRUTH).values())
        found_s = sum(float(v[0]) for v in predicted_parts(S, columns, known.calibration.log_factors).values())
        assert found_s == pytest.approx(true_s, rel=0.12), other
    assert known.calibration.num_samples == 8 * 8


def test_a_layout_seen_again_replaces_what_it_said_before() -> None:
    """However often a layout is looked at, it is one piece of evidence."""
    once = learnt(start(), HERE, TRUTH)
    often = once
    for _ in range(5):
        often = learnt(often, HERE, TRUTH)
    assert np.allclose(often.calibration.covariance, once.calibration.covariance)
    assert often.calibration.version == once.calibration.version + 5
    both = learnt(once, THERE, TRUTH)
    assert len(both.seen) == 2
    assert np.trace(both.calibration.covariance) < np.trace(once.calibration.covariance)


def test_pace_changes_only_noticeably() -> None:
    known = start().paced(2.0)
    assert known.paced(2.1) is known
    assert known.paced(2.5).pace == 2.5
    with pytest.raises(SpecError):
        known.paced(float("nan"))


def test_round_trip() -> None:
    known = learnt(learnt(start(), HERE, TRUTH), THERE, TRUTH).paced(1.2)
    again = Known.from_dict(json.loads(json.dumps(known.to_dict())))
    assert again.to_dict() == known.to_dict()
    assert again.calibration.log_factors == known.calibration.log_factors
    with pytest.raises(SpecError, match="another version"):
        Known.from_dict({**known.to_dict(), "format": 99})


def test_a_job_that_was_never_measured_begins_where_the_others_are() -> None:
    """Two jobs that show the machine's true factors; a third gains, is less sure than they, and surer than cold."""
    jobs = [learnt(start(), layout, TRUTH).paced(1.3) for layout in (HERE, THERE)]
    pool = Pool.of("cpu", jobs)
    other = Layout(tp=4, dp=2).resolve(MODEL)

    def step_s(calibration: Calibration) -> float:
        return estimate_layout(replace(S, calibration=calibration), other).step_s

    columns = LayoutColumns.of([other], MODEL)
    true_s = sum(float(v[0]) for v in predicted_parts(S, columns, TRUTH).values())
    cold, told = (abs(np.log(step_s(c) / true_s)) for c in (Calibration.prior("cpu"), pool.calibration))
    assert told < 0.6 * cold
    one = jobs[0].calibration.sd["gemm"]
    assert one <= pool.calibration.sd["gemm"] + 0.02
    assert pool.calibration.sd["job"] < Calibration.prior("cpu").sd["job"]
    assert pool.pace == 1.3
    assert Pool.of("cpu", []).calibration.log_factors == Calibration.prior("cpu").log_factors


def test_what_a_job_was_told_is_not_counted_as_its_own() -> None:
    """A job that began with what others taught and measured nothing adds nothing to the pool."""
    first = learnt(start(), HERE, TRUTH)
    told = Known.nothing(Pool.of("cpu", [first]).calibration, "k")
    alone, with_told = Pool.of("cpu", [first]), Pool.of("cpu", [first, told])
    assert np.allclose(alone.calibration.mean, with_told.calibration.mean)
    assert np.allclose(alone.calibration.covariance, with_told.calibration.covariance)
