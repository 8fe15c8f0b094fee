"""A job under any layout beside its one-process twin: small models, the same real text, losses step by step."""

from __future__ import annotations

import atexit
import shutil
import sysconfig
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from suika.core.cluster import Device
from suika.core.job import JobSpec, OptimizerSpec
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.runtime.groups import build_groups
from suika.runtime.program import StepResult
from suika.train.data import prepare
from suika.train.program import Trainer, build

TIMEOUT_S = 60.0


@cache
def text() -> str:
    """A prepared `.bin` of this Python's own sources (200 kB)."""
    folder = tempfile.mkdtemp(prefix="suika-train-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "stdlib.bin")
    prepare(sysconfig.get_paths()["stdlib"], path, pattern="*.py", max_bytes=200_000)
    return str(path)


def gpt(**changes: Any) -> ModelSpec:
    shape = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257, "tied": True}
    return ModelSpec(**{"name": "gpt-tiny", "family": "gpt", **shape, **changes})


def llama(**changes: Any) -> ModelSpec:
    shape = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 257}
    return ModelSpec(**{"name": "llama-tiny", "family": "llama", **shape, **changes})


def moe(make: Callable[..., ModelSpec] = llama, **changes: Any) -> ModelSpec:
    """Six experts in all but the first of three layers, two for each token and one for all."""
    mixture = {"experts": 6, "experts_per_token": 2, "shared_experts": 1, "expert_ffn": 16, "first_dense_layers": 1}
    return make(**{"name": "moe-tiny", "layers": 3, "balance": 0.1, **mixture, **changes})


def job(model: ModelSpec, precision: str = "fp64", **changes: Any) -> JobSpec:
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": model,
        "data": "stdlib",
        "global_batch": 8,
        "sequence_length": 16,
        "steps": 10,
        "precision": precision,
        "seed": 3,
        "optimizer": OptimizerSpec(lr=3e-3, warmup_steps=2),
    }
    return JobSpec(**{**fields, **changes})


def plan_of(layout: Layout) -> Plan:
    return Plan(layout, Placement(tuple(Device("n0", i) for i in range(layout.num_ranks))))


def trainer(spec: JobSpec, layout: Layout, rank: int, store: dist.Store, prefix: str = "g0") -> Trainer:
    """A rank without storage."""
    plan = plan_of(layout)
    return build(spec, plan, rank, build_groups(store, prefix, plan.mesh, rank, TIMEOUT_S), text())


def run(spec: JobSpec, layout: Layout, steps: int = 10) -> list[StepResult]:
    """The result of each step from a fresh start; asserts that all ranks agree on every bit of it."""
    text()

    def body(rank: int, store: dist.Store) -> list[StepResult]:
        program = trainer(spec, layout, rank, store)
        program.bind(program.initialise())
        return [program.step(()) for _ in range(steps)]

    results = run_ranks(layout.num_ranks, body, TIMEOUT_S)
    assert all(other == results[0] for other in results)
    return results[0]


_twins: dict[tuple[str, int], list[StepResult]] = {}


def twin(spec: JobSpec, steps: int = 10) -> list[StepResult]:
    """The same job in one process; run once per session."""
    key = spec.model_dump_json(), steps
    if key not in _twins:
        _twins[key] = run(spec, Layout(), steps)
    return _twins[key]


def max_loss_difference(one: list[StepResult], other: list[StepResult]) -> float:
    return max(abs(a.loss - b.loss) for a, b in zip(one, other, strict=True))
