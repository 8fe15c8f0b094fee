"""The live check: from profiled steps of one layout of the built-in trainer, predict other layouts, then run them.

Real processes on emulated CPU devices that share the cores of this machine. Each layout trains for some steps, in
several rounds; the first steps after a move are left out. The prediction uses the samples of the first layout only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from suika.backends.local import LocalBackend
from suika.core.cluster import Cluster, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.estimate.calibrate import Calibration
from suika.estimate.grid import LayoutColumns
from suika.estimate.predict import Setting, estimate_layout, setting
from suika.estimate.recipe import BUILT_IN
from suika.estimate.samples import calibrate, measured_parts, steady
from suika.estimate.step import price
from suika.runtime.coordinator import JobRun
from suika.runtime.events import JobEvent, Sampled, StepDone
from suika.train.data import prepare

CLUSTER = Cluster((Node("a", 4, "cpu"), Node("b", 4, "cpu")))
SAMPLED = "tp=2,pp=2,dp=2,micro_batch=2"
PREDICTED = (
    "tp=1,pp=1,dp=8",
    "tp=1,pp=2,dp=4",
    "tp=2,pp=1,dp=4",
    "tp=1,pp=3,dp=2",
    "tp=2,pp=2,dp=1,micro_batch=2",
    "tp=4,pp=1,dp=2,micro_batch=2",
    "tp=1,pp=1,dp=4,micro_batch=2",
    "tp=1,pp=2,dp=2,micro_batch=4",
    "tp=2,pp=1,dp=2,micro_batch=4",
    "tp=1,pp=4,dp=2",
)
WARM_STEPS = 2  # of each stay in a layout
TIMEOUT_S = 120.0


def job_spec(data: Path) -> JobSpec:
    """Big enough that arithmetic matters, small enough for two cores."""
    model = {"family": "llama", "layers": 6, "hidden": 128, "ffn": 352, "heads": 8, "kv_heads": 4, "vocab": 257}
    fixed = {"sequence_length": 64, "precision": "fp32", "snapshot_every_steps": 0, "steps": 1_000_000}
    return parse_job({"name": "live", "model": model, "data": str(data), "global_batch": 16, **fixed})


class _Watched:
    """The job's events, as the check needs them."""

    def __init__(self) -> None:
        self.news = threading.Condition()
        self.ends_s: dict[int, list[float]] = {}  # generation -> step ends
        self.samples: dict[int, list[StepSample]] = {}

    def hear(self, event: JobEvent) -> None:
        with self.news:
            if isinstance(event, StepDone):
                self.ends_s.setdefault(event.generation, []).append(event.at_s)
            elif isinstance(event, Sampled):
                self.samples.setdefault(event.generation, []).append(event.sample)
            self.news.notify_all()

    def step_times(self, generation: int, num_steps: int) -> list[float]:
        """The next `num_steps` steps of a generation after its warm-up."""
        need = WARM_STEPS + num_steps + 1
        with self.news:
            done = self.news.wait_for(lambda: len(self.ends_s.get(generation, ())) >= need, TIMEOUT_S)
            assert done, f"generation {generation} did not train {need} steps in {TIMEOUT_S:.0f} s"
            ends = self.ends_s[generation][WARM_STEPS:need]
        return [b - a for a, b in pairwise(ends)]


@contextmanager
def running_job() -> Iterator[tuple[JobSpec, JobRun, _Watched]]:
    """A job of the built-in trainer on a local backend, not started yet."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, data = folder / "text.txt", folder / "text.bin"
        text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(50_000)))
        prepare(text, data)
        spec, watched = job_spec(data), _Watched()
        with LocalBackend(CLUSTER, folder / "run") as backend:
            run = JobRun("live", spec, backend, CLUSTER, folder, data_path=str(data), on_event=watched.hear)
            try:
                yield spec, run, watched
            finally:
                run.close()


def live(rounds: int = 3, num_steps: int = 8) -> dict[str, Any]:
    """Sample one layout, predict `PREDICTED`, run them `rounds` times, compare medians."""
    cores = len(os.sched_getaffinity(0))
    with running_job() as (spec, run, watched):
        layouts = [Layout.parse(text) for text in (SAMPLED, *PREDICTED)]
        plans = [_plan(layout, spec) for layout in layouts]
        run.start(plans[0], 1).result(TIMEOUT_S)
        generation, plan_of = 1, {1: 0}
        times: dict[int, list[float]] = {0: watched.step_times(1, 12 + num_steps)}
        sampled = list(watched.samples.get(1, []))
        for _ in range(rounds):
            for i, plan in enumerate(plans):
                if generation > 1 or i > 0:
                    generation += 1
                    plan_of[generation] = i
                    reason = Reason(ReasonCode.USER, "the check looks at another layout")
                    record = run.redeploy(plan, generation, reason).result(TIMEOUT_S)
                    assert record.error is None, record.error
                    times.setdefault(i, []).extend(watched.step_times(generation, num_steps))
                    if i == 0:
                        sampled.extend(watched.samples.get(generation, []))
        overhead = _overhead(watched)
    s = live_setting(spec, cores)
    work = {plan_of[g]: _work_s(samples) for g, samples in watched.samples.items()}
    known = calibrate(Calibration.prior("cpu", "live"), s, layouts[0].resolve(spec.model), sampled)
    rows = [_row(s, known, layouts[i], times[i], work.get(i)) for i in range(len(layouts))]
    errors = [abs(row["error_percent"]) for row in rows[1:]]
    return {
        "cores": cores,
        "sampled": SAMPLED,
        "num_samples": len(sampled),
        "median_ape": statistics.median(errors),
        "max_ape": max(errors),
        "profiler_overhead": overhead,
        "first_sample_step": min((s.step for s in watched.samples.get(1, [])), default=None),
        "layouts": rows,
        "factors": known.table(),
    }


def live_setting(spec: JobSpec, cores: int) -> Setting:
    return setting(
        spec.model,
        "cpu",
        global_batch=spec.global_batch,
        sequence_length=spec.sequence_length,
        precision=spec.precision,
        cluster=CLUSTER,
        recipe=BUILT_IN,
        cores=cores,
    )


def _plan(layout: Layout, spec: JobSpec) -> Plan:
    devices = CLUSTER.devices[: layout.num_ranks]
    return Plan.checked(layout, devices, spec.model, spec.global_batch, spec.sequence_length, CLUSTER)


def _row(s: Setting, known: Calibration, layout: Layout, times: list[float], work_s: float | None) -> dict[str, Any]:
    measured = statistics.median(times)
    cold = estimate_layout(s, layout.resolve(s.model)).step_s
    warm = estimate_layout(replace(s, calibration=known), layout.resolve(s.model))
    return {
        "layout": str(layout),
        "ranks": layout.num_ranks,
        "measured_s": measured,
        "spread_s": statistics.pstdev(times),
        "cold_s": cold,
        "predicted_s": warm.step_s,
        "work_s": work_s,
        "predicted_work_s": _predicted_work_s(s, known, layout),
        "error_percent": 100 * (warm.step_s / measured - 1),
    }


def _work_s(samples: list[StepSample]) -> float:
    """Processor seconds of all ranks in one step."""
    return sum(measured_parts(steady(samples)).values()) * len({s.rank for s in samples})


def _predicted_work_s(s: Setting, known: Calibration, layout: Layout) -> float:
    columns = LayoutColumns.of([layout], s.model)
    return float(price(s.grid(columns), known.log_factors).work_s[0])


def _overhead(watched: _Watched) -> float:
    """Profiler seconds over step seconds of all ranks, counting every step."""
    spent = sum(s.profiler_s for samples in watched.samples.values() for s in samples)
    trained = 0.0
    for generation, samples in watched.samples.items():
        ends = watched.ends_s.get(generation, [])
        if len(ends) > 1:
            trained += (ends[-1] - ends[0]) * len({s.rank for s in samples})
    return spent / trained if trained else 0.0
