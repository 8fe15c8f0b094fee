"""A slow rank is a straggler's, not the layout's: what samples say of a layout's parts does not move with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from suika.core.layout import Layout, micro_batch_shares
from suika.core.mesh import Mesh
from suika.core.presets import preset
from suika.core.sample import StepSample
from suika.estimate.calibrate import Calibration
from suika.estimate.predict import estimate_layout, setting
from suika.estimate.recipe import BUILT_IN
from suika.estimate.samples import SLOW, calibrate, measured_parts

MODEL = preset("gpt3-125m")
BATCH = 16
STAGE_S = (0.9, 0.2, 0.2, 0.7)  # per micro-batch: embedding and head make the ends of a pipeline heavy


def samples(layout: Layout, num: int = 6, batch: int = BATCH) -> list[StepSample]:
    """Of steps that take one second, whatever a rank does in them."""
    mesh, shares = Mesh(layout), micro_batch_shares(batch, layout.micro_batch, layout.dp)

    def one(step: int, rank: int) -> StepSample:
        place = mesh.coordinate(rank)
        compute_s = shares[place.dp] * STAGE_S[place.pp] * (1 + 0.02 * ((step + rank) % 3))
        op_s = {"compute": compute_s, "tp": 0.1 * shares[place.dp], "dp": 0.05, "optimizer": 0.03}
        return StepSample("j", 1, step, rank, 1.0, op_s)

    return [one(step, rank) for step in range(num) for rank in range(mesh.num_ranks)]


def slowed(found: list[StepSample], rank: int, times: float, from_step: int = 0) -> list[StepSample]:
    """The processor of `rank` is slower; the step takes as long as before."""

    def one(s: StepSample) -> StepSample:
        slow = s.rank == rank and s.step >= from_step
        return replace(s, op_s={k: times * v for k, v in s.op_s.items()}) if slow else s

    return [one(s) for s in found]


@pytest.mark.parametrize("from_step", [0, 2, 4])
@pytest.mark.parametrize("times", [2.0, 10.0])
@pytest.mark.parametrize("layout", ["tp=2,pp=2,dp=2", "dp=2", "tp=2", "pp=4,dp=2", "dp=8"])
def test_a_slow_rank_changes_nothing(layout: str, times: float, from_step: int) -> None:
    """In all its samples, most or few; among two peers the faster one is believed."""
    x = Layout.parse(layout)
    clean = samples(x)
    before = measured_parts(clean, Mesh(x), BATCH)
    for rank in range(x.num_ranks):
        after = measured_parts(slowed(clean, rank, times, from_step), Mesh(x), BATCH)
        assert after == pytest.approx(before, rel=0.03), rank


def test_a_slow_rank_does_not_raise_the_price() -> None:
    x = Layout(tp=2, pp=2, dp=2)
    s = setting(MODEL, "cpu", global_batch=BATCH, sequence_length=128, precision="fp32", recipe=BUILT_IN)

    def price_s(found: list[StepSample]) -> float:
        return estimate_layout(replace(s, calibration=calibrate(Calibration.prior("cpu"), s, x, found)), x).step_s

    assert price_s(slowed(samples(x), 3, 4.0)) == pytest.approx(price_s(samples(x)), rel=0.02)


@pytest.mark.parametrize(("layout", "batch"), [("pp=4", 16), ("pp=4,dp=2", 16), ("dp=3", 4), ("tp=2,dp=3", 5)])
def test_uneven_stages_and_shares_are_no_slowness(layout: str, batch: int) -> None:
    """Every rank's seconds count in full: heavy stages, and replicas with one more micro-batch than others."""
    x = Layout.parse(layout)
    found = samples(x, batch=batch)
    mean_s = sum(s.op_s["compute"] for s in found) / len(found)
    assert measured_parts(found, Mesh(x), batch)["compute"] == pytest.approx(mean_s, rel=0.03)


def test_ranks_that_differ_a_little_all_count() -> None:
    """Half as long again is not yet a straggler: devices of one type differ, and their mean is what a layout costs."""
    x = Layout(dp=4)
    clean = samples(x)
    times = 0.95 * SLOW
    before, after = (measured_parts(found, Mesh(x), BATCH) for found in (clean, slowed(clean, 1, times)))
    assert after["compute"] == pytest.approx((3 + times) / 4 * before["compute"], rel=0.03)


def test_a_rank_alone_on_its_stage_is_believed() -> None:
    x = Layout(pp=4)
    clean = samples(x)
    before, after = (measured_parts(found, Mesh(x), BATCH) for found in (clean, slowed(clean, 1, 4.0)))
    assert after["compute"] > 1.2 * before["compute"]
