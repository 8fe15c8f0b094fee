"""The controller learns from its jobs: first within 50 steps, cheaply afterwards, over a restart, and shows it."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import CLUSTER, plan, running, spec
from world import World

from suika.cli import jobs as commands
from suika.control.database import DatabaseStore
from suika.control.learned import LESSONS_AT_ONCE, LESSONS_PER_S, Learned, Window
from suika.control.memory_store import MemoryStore
from suika.control.pricing import EstimatedPricing, per_node
from suika.core.cluster import parse_cluster_shorthand
from suika.core.job import Job, JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.estimate.columns import LayoutColumns
from suika.estimate.knowledge import Known
from suika.estimate.predict import Setting
from suika.estimate.samples import predicted_parts
from suika.runtime.events import Sampled
from suika.runtime.profiler import EVERY, WARM_STEPS

SLOW = {"gemm": 0.5, "attention": 0.5, "vector": 0.5, "host": 0.5, "tp": 0.5, "dp": 0.5}


def samples(
    job: JobSpec, of: Plan, num: int, log: dict[str, float] | None = None, pace: float = 1.0
) -> list[StepSample]:
    """Samples of a machine whose true log factors are `log`, `EVERY` steps apart."""
    s: Setting = EstimatedPricing(CLUSTER)._setting(job, "cpu", per_node(of))
    parts = predicted_parts(s, LayoutColumns.of([of.layout], job.model), SLOW if log is None else log)
    op_s = {name: pace * float(np.ravel(value)[0]) for name, value in parts.items()}
    steps = [WARM_STEPS + 1 + EVERY * i for i in range(num)]
    return [StepSample("j1", 1, step, rank, 0.1, op_s) for step in steps for rank in range(of.layout.num_ranks)]


def fed(learned: Learned, window: Window, job: Job, found: list[StepSample], pricing: EstimatedPricing) -> int | None:
    """Hands samples over one by one; the step after whose samples the job was first calibrated."""
    first = None
    for sample in found:
        window.add(sample)
        learned.settle(job, job.plan, window, None, pricing)
        if first is None and learned.own(job.id):
            first = sample.step
    return first


def test_the_first_calibration_comes_within_50_steps_and_later_ones_only_with_news() -> None:
    store, pricing = MemoryStore(), EstimatedPricing(CLUSTER)
    job = running(store)
    learned, window = Learned(store), Window()
    first = fed(learned, window, job, samples(job.spec, job.plan, 2), pricing)
    assert first is not None
    assert first <= 50
    (known,) = learned.of(job.id)
    assert known.calibration.num_samples == 2 * 4
    assert pricing.step_s(job.spec, job.plan, (known,)) > 1.3 * pricing.step_s(job.spec, job.plan)
    fed(learned, window, job, samples(job.spec, job.plan, 40), pricing)
    assert learned.of(job.id) == (known,)  # the very same object: no curve is made anew
    window.clear()
    fed(learned, window, job, samples(job.spec, job.plan, 2, pace=1.5), pricing)
    (other,) = learned.of(job.id)
    assert other.calibration.version > known.calibration.version


def slow(sample: StepSample, times: float, kind: str = "steady") -> StepSample:
    """As `sample`, but that much slower in every class."""
    op_s = {name: times * seconds for name, seconds in sample.op_s.items()}
    return replace(sample, kind=kind, step_s=times * sample.step_s, op_s=op_s)


def teach_the_same(clean: list[StepSample], dirty: list[StepSample]) -> None:
    """Both series lead to the same parts and the same price, which is not the cold one."""
    store, pricing = MemoryStore(), EstimatedPricing(CLUSTER)
    job = running(store)
    begun = Known.nothing(Learned(store)._base("cpu"), "j1")
    one, other = (pricing.learnt(job.spec, job.plan, begun, found) for found in (clean, dirty))
    assert one.seen[0].parts_s == pytest.approx(other.seen[0].parts_s)
    prices = [pricing.step_s(job.spec, job.plan, (known,)) for known in (begun, one, other)]
    assert prices[2] == pytest.approx(prices[1], rel=1e-3)
    assert prices[1] > 1.3 * prices[0]


def clean_samples() -> list[StepSample]:
    job = running(MemoryStore())
    return samples(job.spec, job.plan, 8)


@pytest.mark.parametrize("kind", ["first", "move", "snapshot", "evaluation"])
@pytest.mark.parametrize("times", [0.2, 1.1, 30.0])
def test_steps_of_other_kinds_teach_nothing(kind: str, times: float) -> None:
    """However many, and even where their times look like steady ones."""
    clean = clean_samples()
    teach_the_same(clean, [*(slow(s, times, kind) for s in clean), *clean])


@pytest.mark.parametrize("kind", ["first", "move", "snapshot", "evaluation"])
def test_a_job_that_shows_nothing_else_stays_cold(kind: str) -> None:
    job, pricing = running(MemoryStore()), EstimatedPricing(CLUSTER)
    begun = Known.nothing(Learned(MemoryStore())._base("cpu"), "j1")
    found = [slow(s, 1.0, kind) for s in clean_samples()]
    assert pricing.learnt(job.spec, job.plan, begun, found) is begun


def test_unmarked_first_steps_teach_nothing() -> None:
    clean = clean_samples()
    teach_the_same(clean, [*(slow(s, 50.0) for s in clean[:4]), *clean])


@pytest.mark.parametrize("times", [0.1, 3.0, 20.0])
def test_a_straggling_step_teaches_nothing(times: float) -> None:
    """One step is slow, or its clock is wrong, on one rank or on all that waited for it."""
    clean = clean_samples()
    teach_the_same(clean, [*clean, slow(clean[5], times)])
    teach_the_same(clean, [*clean, *(slow(s, times) for s in clean[4:8])])


def test_it_survives_a_restart_and_a_record_of_another_version_is_left_out(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    store, pricing = DatabaseStore(url), EstimatedPricing(CLUSTER)
    job = running(store)
    learned = Learned(store)
    fed(learned, Window(), job, samples(job.spec, job.plan, 2), pricing)
    before = pricing.step_s(job.spec, job.plan, learned.of(job.id))
    running(store, "j2", "b")
    store.calibrated("j2", "cpu", {"format": 99})
    store.close()
    again = DatabaseStore(url)
    back = Learned(again)
    assert pricing.step_s(job.spec, job.plan, back.of("j1")) == before
    assert back.own("j1")["cpu"].to_dict() == learned.own("j1")["cpu"].to_dict()
    assert back.dropped == ["j2"]
    assert back.of("j2")[0].calibration.num_samples > 0  # what j1 taught
    again.close()


def test_a_thousand_steady_jobs_cost_nothing(tmp_path: Path) -> None:
    """After their first calibration a round over 1,000 jobs makes no price and no curve anew."""
    cluster = parse_cluster_shorthand("4x8:cpu")
    pricing, store = EstimatedPricing(cluster), MemoryStore()
    wanted = spec()
    of = plan(Layout(tp=2, dp=2), wanted)
    learned = Learned(store)
    found = samples(wanted, of, 2)
    jobs = [replace(Job(f"j{i}", wanted, float(i)), plan=of) for i in range(1000)]
    windows = {job.id: Window() for job in jobs}
    for sample in found:
        windows["j0"].add(sample)
    learned.settle(jobs[0], of, windows["j0"], 0.1, pricing)
    known = learned.own("j0")["cpu"]
    for job in jobs[1:]:
        learned._jobs[job.id] = {"cpu": known}
    for job in jobs:
        pricing.curve(wanted, learned.of(job.id))
    misses = pricing._curve.cache_info().misses
    began = time.process_time()
    for job in jobs:
        windows[job.id].add(found[0])
        learned.settle(job, of, windows[job.id], 0.1, pricing)
        pricing.curve(wanted, learned.of(job.id))
    assert time.process_time() - began < 2.0
    assert pricing._curve.cache_info().misses == misses


def test_a_thousand_jobs_that_start_at_once_are_taken_in_over_time() -> None:
    pricing, store, wanted = EstimatedPricing(CLUSTER), MemoryStore(), spec()
    of = plan(Layout(tp=2, dp=2), wanted)
    now_s = [0.0]
    learned, found, at_once = Learned(store, lambda: now_s[0]), samples(wanted, of, 2), int(LESSONS_AT_ONCE)
    jobs = [replace(Job(f"j{i}", wanted, float(i)), plan=of) for i in range(3 * at_once)]
    windows = {job.id: Window() for job in jobs}
    for window in windows.values():
        for sample in found:
            window.add(sample)
    for now_s[0], taught in ((0.0, at_once), (3.0 / LESSONS_PER_S, at_once + 3), (1e6, 2 * at_once + 3)):
        learned.begin_round()
        for job in jobs:
            learned.settle(job, of, windows[job.id], None, pricing)
        assert sum(bool(learned.own(job.id)) for job in jobs) == taught


def test_a_change_of_pace_makes_no_price_anew() -> None:
    store, pricing = MemoryStore(), EstimatedPricing(CLUSTER)
    job = running(store)
    learned, window = Learned(store), Window()
    learned.settle(job, job.plan, window, 0.2, pricing)
    before = pricing.curve(job.spec, learned.of(job.id))
    misses = pricing._unpaced.cache_info().misses
    learned.settle(job, job.plan, window, 0.4, pricing)
    after = pricing.curve(job.spec, learned.of(job.id))
    assert [o.step_s for o in after.options] == pytest.approx([2 * o.step_s for o in before.options])
    assert pricing._unpaced.cache_info().misses == misses


class Priced(World):
    """The scripted world with the estimator's prices."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        pricing: Any = EstimatedPricing(self.cluster, cores=2)
        self.controller.pricing = self.controller.actor.pricing = pricing


def test_describe_shows_predicted_and_measured_factors_and_other_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = Priced(tmp_path)
    run = world.start("a", "n0/0", "n0/1", "n0/2", "n0/3", steps=1000)
    cold = world.api.describe("a")["estimate"]
    assert cold["calibration"] is None
    assert cold["measured_step_s"] is None
    job = world.job("a")
    slow = samples(job.spec, job.plan, 2)
    for sample in slow:
        run.on_event(Sampled(job.id, 1, replace(sample, job_id=job.id)))
    run.steps(8, step_s=0.25)
    world.turn()
    told = world.api.describe("a")["estimate"]
    assert told["measured_step_s"] == pytest.approx(0.25)
    assert told["predicted_step_s"] > 1.3 * told["cold_step_s"] == pytest.approx(1.3 * cold["cold_step_s"])
    assert told["pace"] == pytest.approx(0.25 / told["predicted_step_s"], rel=0.12)
    assert told["error_percent"] == pytest.approx(100 * (told["predicted_step_s"] / 0.25 - 1))
    known = told["calibration"]
    assert known["num_samples"] == len(slow)
    assert [row["op_class"] for row in known["factors"]][-1] == "job"
    assert all(row["p10"] <= row["factor"] <= row["p90"] for row in known["factors"])
    assert known["layouts"][0]["layout"] == job.plan.layout.to_dict()
    assert len(told["others"]) >= 3
    assert all(row["p10_s"] < row["predicted_step_s"] < row["p90_s"] for row in told["others"])
    assert job.plan.layout.to_dict() not in [row["layout"] for row in told["others"]]
    monkeypatch.setattr(commands, "ask", lambda call, **arguments: getattr(world.api, call)(**arguments))
    commands.describe("a")
    page = capsys.readouterr().out
    assert "Step on cpu: " in page
    assert "Other layouts of these devices" in page
    assert f"{len(slow)} samples of {job.plan.layout}" in page
    assert "gemm" in page.split("samples of")[1]


def test_a_job_that_was_never_measured_is_priced_by_what_others_taught(tmp_path: Path) -> None:
    world = Priced(tmp_path)
    run = world.start("a", "n0/0", "n0/1", steps=1000)
    job = world.job("a")
    for sample in samples(job.spec, job.plan, 2):
        run.on_event(Sampled(job.id, 1, replace(sample, job_id=job.id)))
    run.steps(8, step_s=0.25)
    before = world.controller.pricing.curve(job.spec).options
    world.decide()
    world.submit("b")
    world.decide()
    view = next(view for view in world.policy.seen[-1].jobs if view.id == world.job("b").id)
    cold = {(o.shape, o.layout): o.step_s for o in before}
    assert all(o.step_s > 1.3 * cold.get((o.shape, o.layout), 0.0) for o in view.curve.options)
