"""A job under any layout beside its one-process twin: small models, the same real text, losses step by step."""

from __future__ import annotations

import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import run_ranks

from suika.core.cluster import Device
from suika.core.job import JobSpec, OptimizerSpec
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.runtime.groups import build_groups
from suika.train.data import prepare
from suika.train.program import Trainer, build

TIMEOUT_S = 40.0


@cache
def text() -> str:
    """A prepared `.bin` of this Python's own sources (200 kB)."""
    folder = tempfile.mkdtemp(prefix="suika-train-")
    path = Path(folder, "stdlib.bin")
    prepare(sysconfig.get_paths()["stdlib"], path, pattern="*.py", max_bytes=200_000)
    return str(path)


def gpt(**changes: Any) -> ModelSpec:
    shape = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257, "tied": True}
    return ModelSpec(**{"name": "gpt-tiny", "family": "gpt", **shape, **changes})


def llama(**changes: Any) -> ModelSpec:
    shape = {"layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 257}
    return ModelSpec(**{"name": "llama-tiny", "family": "llama", **shape, **changes})


def job(model: ModelSpec, precision: str = "fp64", **changes: Any) -> JobSpec:
    fields = {
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
    """A freshly initialised rank."""
    plan = plan_of(layout)
    groups = build_groups(store, prefix, Mesh(layout, plan.order), rank, TIMEOUT_S)
    program = build(spec, plan, rank, groups, text())
    program.bind(program.initialise())
    return program


def losses(spec: JobSpec, layout: Layout, steps: int = 10) -> list[float]:
    """The loss of each step; asserts that all ranks agree on every result."""
    text()

    def body(rank: int, store: dist.Store) -> list[Any]:
        program = trainer(spec, layout, rank, store)
        return [program.step(()) for _ in range(steps)]

    results = run_ranks(layout.num_ranks, body, TIMEOUT_S)
    assert all(r == results[0] for r in results)
    return [step.loss for step in results[0]]


@cache
def twin(spec_json: str, steps: int = 10) -> list[float]:
    return losses(JobSpec.model_validate_json(spec_json), Layout(), steps)
