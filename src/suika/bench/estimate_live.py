"""The live check: from profiled steps of one layout of the built-in trainer, predict other layouts, then run them.

Real processes on emulated CPU devices that share the cores of this machine. Each layout trains for some steps, in
several rounds; the first steps after a move are left out. The prediction uses the samples of the first layout only.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from suika.backends.local import LocalBackend
from suika.core.cluster import Cluster, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.errors import require
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.plan import Plan
from suika.core.sample import StepSample
from suika.estimate.calibrate import Calibration
from suika.estimate.columns import LayoutColumns
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


# Big enough that arithmetic matters, small enough for two cores. Nothing in the model was chosen on `other`.
_LLAMA = {"family": "llama", "layers": 6, "hidden": 128, "ffn": 352, "heads": 8, "kv_heads": 4, "vocab": 257}
_GPT = {"family": "gpt", "layers": 8, "hidden": 96, "ffn": 384, "heads": 8, "vocab": 257, "tied": True}
SHAPES: dict[str, dict[str, Any]] = {
    "first": {"model": _LLAMA, "global_batch": 16, "sequence_length": 64},
    "other": {"model": _GPT, "global_batch": 24, "sequence_length": 96},
}


def write_data(folder: Path) -> Path:
    """Tokens to train on, in `folder`."""
    text, data = folder / "text.txt", folder / "text.bin"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(50_000)))
    prepare(text, data)
    return data


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


def stay(watched: _Watched, generation: int, num_steps: int) -> tuple[list[float], float]:
    """Step times of a generation, and how many cores others took meanwhile."""
    watched.step_times(generation, 0)
    began_s, busy_s, own_s = time.monotonic(), _busy_s(), _own_s()
    times = watched.step_times(generation, num_steps)
    wall_s = max(time.monotonic() - began_s, 1e-3)
    return times, max(0.0, (_busy_s() - busy_s) - (_own_s() - own_s)) / wall_s


def _busy_s() -> float:
    """Processor seconds of everything on this machine since its start."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Processor seconds of this process and of all that descend from it and live."""
    stats = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            stats[int(path.parent.name)] = (int(fields[1]), int(fields[11]) + int(fields[12]))
    own, ticks = {os.getpid()}, 0
    while found := {pid for pid, (parent, _) in stats.items() if parent in own and pid not in own}:
        own |= found
    ticks = sum(stats[pid][1] for pid in own if pid in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def running_job(body: Mapping[str, Any]) -> Iterator[tuple[JobSpec, JobRun, _Watched]]:
    """A job of the built-in trainer on a local backend, not started yet. `body`: model, batch and length."""
    fixed = {"precision": "fp32", "snapshot_every_steps": 0, "steps": 1_000_000}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = write_data(folder)
        spec, watched = parse_job({"name": "live", "data": str(data), **body, **fixed}), _Watched()
        with LocalBackend(CLUSTER, folder / "run") as backend:
            run = JobRun("live", spec, backend, CLUSTER, folder, data_path=str(data), on_event=watched.hear)
            try:
                yield spec, run, watched
            finally:
                run.close()


def move_to(run: JobRun, plan: Plan, generation: int) -> None:
    """Start the job in its first generation, or move it."""
    if generation == 1:
        run.start(plan, 1).result(TIMEOUT_S)
        return
    reason = Reason(ReasonCode.USER, "the check looks at another layout")
    record = run.redeploy(plan, generation, reason).result(TIMEOUT_S)
    assert record.error is None, record.error


def live(rounds: int = 1, num_steps: int = 6, shape: str = "first") -> dict[str, Any]:
    """Run the sampled layout before and after each of `PREDICTED`, and predict the one in the middle from its samples.

    Factors come from the samples' processor seconds. What others take of the cores is read from the kernel's counters
    while the sampled layout runs, just before and after; what its own step time then leaves unexplained there, the
    pace, counts for the layout in the middle as well, as it does for the options of a running job.
    """
    cores = len(os.sched_getaffinity(0))
    layouts = [Layout.parse(text) for text in (SAMPLED, *PREDICTED)]
    require(shape in SHAPES, "shape", shape, "is unknown", f"known: {', '.join(SHAPES)}")
    with running_job(SHAPES[shape]) as (spec, run, watched):
        plans = [plan_of(layout, spec) for layout in layouts]
        move_to(run, plans[0], 1)
        visits = [(0, 1, *stay(watched, 1, 12))]  # (layout, generation, step times, cores that others took)
        for i in [i for _ in range(rounds) for j in range(1, len(plans)) for i in (j, 0)]:
            generation = visits[-1][1] + 1
            move_to(run, plans[i], generation)
            visits.append((i, generation, *stay(watched, generation, num_steps)))
        overhead = _overhead(watched)
    s = live_setting(spec, cores)
    own = [sample for i, generation, *_ in visits if i == 0 for sample in watched.samples.get(generation, [])]
    known = calibrate(Calibration.prior("cpu", "live"), s, layouts[0].resolve(spec.model), own)
    s = replace(s, calibration=known)
    rows = []
    for before, here, after in zip(visits[::2], visits[1::2], visits[2::2], strict=False):
        beside, others = statistics.median([*before[2], *after[2]]), (before[3] + after[3]) / 2
        free = replace(s, cores=max(cores - others, 0.25 * cores))
        rows.append(_row(free, layouts[0], beside, layouts[here[0]], here[2], watched.samples.get(here[1], [])))
    errors = [abs(row["error_percent"]) for row in rows]
    work_errors = [abs(row["work_error_percent"]) for row in rows if row["work_error_percent"] is not None]
    return {
        "shape": shape,
        "cores": cores,
        "sampled": SAMPLED,
        "num_samples": len(own),
        "median_ape": statistics.median(errors),
        "max_ape": max(errors),
        "work_median_ape": statistics.median(work_errors) if work_errors else None,
        "median_cores_of_others": statistics.median(cores - row["cores"] for row in rows),
        "median_pace": statistics.median(row["pace"] for row in rows),
        "profiler_overhead": overhead,
        "first_sample_step": min((s.step for s in watched.samples.get(1, [])), default=None),
        "layouts": rows,
        "factors": known.table(),
    }


def live_setting(spec: JobSpec, cores: int = 0) -> Setting:
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


def plan_of(layout: Layout, spec: JobSpec) -> Plan:
    devices = CLUSTER.devices[: layout.num_ranks]
    return Plan.checked(layout, devices, spec.model, spec.global_batch, spec.sequence_length, CLUSTER)


def _row(
    s: Setting, sampled: Layout, beside_s: float, layout: Layout, times: list[float], samples: list[StepSample]
) -> dict[str, Any]:
    measured = statistics.median(times)
    pace = beside_s / _step_s(s, sampled)
    predicted = pace * _step_s(s, layout)
    work = None
    if samples:
        parts = measured_parts(steady(samples), Mesh(layout.resolve(s.model)), s.global_batch)
        work = sum(parts.values()) * layout.num_ranks
    expected = _work_s(s, layout)
    return {
        "layout": str(layout),
        "ranks": layout.num_ranks,
        "measured_s": measured,
        "spread_s": statistics.pstdev(times),
        "sampled_layout_s": beside_s,
        "cores": s.cores,
        "pace": pace,
        "predicted_s": predicted,
        "error_percent": 100 * (predicted / measured - 1),
        "work_s": work,
        "predicted_work_s": expected,
        "work_error_percent": 100 * (expected / work - 1) if work else None,
    }


def _step_s(s: Setting, layout: Layout) -> float:
    return estimate_layout(s, layout.resolve(s.model)).step_s


def _work_s(s: Setting, layout: Layout) -> float:
    """Predicted processor seconds of all ranks in one step."""
    log = s.calibration.log_factors if s.calibration else {}
    return float(price(s.grid(LayoutColumns.of([layout], s.model)), log).work_s[0])


def _overhead(watched: _Watched) -> float:
    """Profiler seconds over step seconds of all ranks, counting every step."""
    spent = sum(s.profiler_s for samples in watched.samples.values() for s in samples)
    trained = 0.0
    for generation, samples in watched.samples.items():
        ends = watched.ends_s.get(generation, [])
        if len(ends) > 1:
            trained += (ends[-1] - ends[0]) * len({s.rank for s in samples})
    return spent / trained if trained else 0.0
