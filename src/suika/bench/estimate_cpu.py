"""Constants of an emulated CPU device, measured on this machine: the curve `cpu` of estimate/data/curves.json.

One process trains shards of many shapes, alone: products, element-wise work, attention and dispatch follow from their
sizes. A job on shared cores shows what meetings, hops between stages and updates add to that. All are processor seconds
and are fitted through the model itself. A running job calibrates their common scale: their ratios are what counts. No
shape here is one that the live check predicts.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from suika.bench.estimate_live import live_setting, move_to, plan_of, running_job, stay, write_data
from suika.core.cluster import Cluster, Node
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.plan import Plan
from suika.estimate.columns import Array, LayoutColumns
from suika.estimate.grid import Grid
from suika.estimate.samples import measured_parts, steady
from suika.estimate.step import price
from suika.runtime.program import RankGroups
from suika.train.program import Trainer, build

LENGTH = 80
MODEL = {"family": "llama", "layers": 4, "hidden": 160, "ffn": 448, "heads": 8, "kv_heads": 4, "head_dim": 20} | {
    "vocab": 320
}
HALF = {"heads": 4, "kv_heads": 2, "ffn": 224}  # what a rank of two has of each layer
QUARTER = {"heads": 2, "kv_heads": 1, "ffn": 112}
CHANGES: tuple[dict[str, Any], ...] = (
    *({}, {"layers": 2}, HALF, {**HALF, "layers": 2}, QUARTER),
    *({"hidden": 80, "ffn": 224}, {"hidden": 320, "ffn": 896}, {"family": "gpt", "kv_heads": 8, "ffn": 640}),
)
REPEATS = 12
JOB = {"model": {**MODEL, "layers": 5}, "global_batch": 16, "sequence_length": LENGTH}
LAYOUTS = ("tp=2,pp=2,dp=2", "tp=1,pp=1,dp=8", "tp=2,pp=1,dp=4", "tp=4,pp=1,dp=2", "tp=1,pp=2,dp=4", "tp=1,pp=4,dp=2")
OF_SHARDS = ("gemm", "vector", "attention", "host_layer_s", "micro_batch_s", "memory_bytes_per_s")
OF_JOBS = ("host_tp", "hop_s", "bus_latency_s", "update_s", "update_layer_s")
LOOSE = 0.05  # weight of a constant's log change beside the log errors


@dataclass(frozen=True)
class Constants:
    """Constants by the name of their column in `Grid`, and how well the fit holds (rms of log errors)."""

    values: Mapping[str, float]
    rms: float


def constants() -> dict[str, Any]:
    """Measure and fit both kinds; takes a minute or two."""
    shards = fit_shards(*shard_seconds())
    jobs = fit_jobs(job_parts(), shards.values)
    return {
        "constants": {**shards.values, **jobs.values},
        "shards_rms": shards.rms,
        "jobs_rms": jobs.rms,
    }


def shard_seconds() -> tuple[list[JobSpec], Array]:
    """Processor seconds of forward and backward of one micro-batch: the least of some, in shuffled order."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = write_data(Path(name))
        bodies = [
            {"model": {**MODEL, **change}, "global_batch": 2 * size, "sequence_length": LENGTH}
            for change, size in itertools.product(CHANGES, (1, 2, 4))
        ]
        specs = [parse_job({"name": "shard", "data": str(data), "precision": "fp32", "steps": 10, **b}) for b in bodies]
        trainers = [_alone(spec, data) for spec in specs]
        times: list[list[float]] = [[] for _ in trainers]
        order = np.random.default_rng(0)
        for _ in range(REPEATS):
            for i in order.permutation(len(trainers)):
                began_s = time.thread_time()
                trainers[i].begin()
                times[i].append((time.thread_time() - began_s) / 2)
                trainers[i].step()
    return specs, np.array([min(rows[1:]) for rows in times])


def _micro_batch(spec: JobSpec) -> Layout:
    return Layout(micro_batch=spec.global_batch // 2)


def _alone(spec: JobSpec, data: Path) -> Trainer:
    cluster = Cluster((Node("a", 1, "cpu"),))
    plan = Plan.checked(
        _micro_batch(spec), cluster.devices, spec.model, spec.global_batch, spec.sequence_length, cluster
    )
    trainer = build(spec, plan, 0, RankGroups(None, None, None, None, None), str(data))
    trainer.bind(trainer.initialise())
    return trainer


def fit_shards(specs: Sequence[JobSpec], seconds: Array) -> Constants:
    """`seconds` of one micro-batch of each spec, alone."""
    grid = Grid.stack([_grid(spec, _micro_batch(spec)) for spec in specs])

    def errors(changed: Grid) -> Array:
        return np.log(price(changed).work_parts_s["compute"] / 2 / seconds)

    return _fit(grid, OF_SHARDS, errors)


def job_parts() -> list[tuple[JobSpec, Layout, dict[str, float]]]:
    """Processor seconds by part of each of `LAYOUTS` of a job whose ranks share this machine's cores."""
    found = []
    with running_job(JOB) as (spec, run, watched):
        for generation, text in enumerate(LAYOUTS, start=1):
            layout = Layout.parse(text)
            move_to(run, plan_of(layout, spec), generation)
            stay(watched, generation, 12)
            samples = steady(watched.samples.get(generation, []))
            parts = measured_parts(samples, Mesh(layout.resolve(spec.model)), spec.global_batch)
            found.append((spec, layout, parts))
    return found


def fit_jobs(jobs: Sequence[tuple[JobSpec, Layout, Mapping[str, float]]], known: Mapping[str, float]) -> Constants:
    """What jobs add to `known`, the constants of shards. How much slower shared cores compute is fitted beside."""
    grid = Grid.stack([_grid(spec, layout) for spec, layout, _ in jobs])
    grid = replace(grid, **{name: np.full(len(grid), value) for name, value in known.items()})
    seconds = {part: np.array([parts[part] for *_, parts in jobs]) for part in ("compute", "tp", "optimizer")}

    def errors(changed: Grid) -> Array:
        found = price(changed).work_parts_s
        logs = {part: np.log(np.maximum(found[part], 1e-9) / np.maximum(s, 1e-9)) for part, s in seconds.items()}
        slower = statistics.median(logs["compute"])
        apart = np.where(changed.tp > 1, logs["tp"], 0.0)
        return np.concatenate((logs["compute"] - slower, apart - slower * (changed.tp > 1), logs["optimizer"] - slower))

    return _fit(grid, OF_JOBS, errors)


def _grid(spec: JobSpec, layout: Layout) -> Grid:
    return live_setting(spec).grid(LayoutColumns.of([layout], spec.model))


def _fit(grid: Grid, names: Sequence[str], errors: Any) -> Constants:
    """The constants `names` of `grid` that make `errors` of it least, from the shipped ones on."""
    shipped = {name: float(np.ravel(getattr(grid, name))[0]) for name in names}

    def changed(x: Array) -> Grid:
        values = {name: np.full(len(grid), shipped[name] * np.exp(v)) for name, v in zip(names, x, strict=True)}
        return replace(grid, **values)

    found = least_squares(lambda x: np.concatenate((errors(changed(x)), LOOSE * x)), np.zeros(len(names)))
    rest = errors(changed(found.x))
    values = {name: shipped[name] * float(np.exp(v)) for name, v in zip(names, found.x, strict=True)}
    return Constants(values, float(np.sqrt(np.mean(rest**2))))
