"""A job's state as whole logical tensors: collected from ranks (copies must agree), and cut up again for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import run_ranks
from twins import TIMEOUT_S, text, trainer

from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.tensors import logical_tensors
from suika.reshard.regions import Box
from suika.reshard.state import StateKey, rank_regions
from suika.runtime.program import StepResult

State = dict[StateKey, np.ndarray]
Buffers = dict[str, np.ndarray]


def _view(buffers: Buffers, buffer: str, offset: int, box: Box) -> np.ndarray:
    shape = [b - a for a, b in zip(box.starts, box.stops, strict=True)]
    return buffers[buffer].reshape(-1)[offset : offset + box.numel].reshape(shape)


def bits(buffer: torch.Tensor) -> np.ndarray:
    """The buffer's memory as an array; numpy has no bfloat16, so that one is seen as integers."""
    return (buffer.view(torch.int16) if buffer.dtype == torch.bfloat16 else buffer).numpy()


def _inside(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))


def merge(spec: JobSpec, layout: Layout, ranks: list[Buffers]) -> State:
    """Every logical tensor, whole. Raises `ValueError` that names tensor and ranks when two copies differ in a bit."""
    shapes = {t.name: t.shape for t in logical_tensors(spec.model, spec.sequence_length)}
    state: State = {}
    owner: dict[StateKey, np.ndarray] = {}
    for rank, buffers in enumerate(ranks):
        for region in rank_regions(spec.model, layout, spec.sequence_length, spec.precision, rank):
            part = _view(buffers, region.buffer, region.offset, region.box)
            whole = state.setdefault(region.key, np.zeros(shapes[region.key.tensor], part.dtype))[_inside(region.box)]
            owners = owner.setdefault(region.key, np.full(shapes[region.key.tensor], -1))[_inside(region.box)]
            differs = (owners >= 0) & (whole != part)
            if differs.any():
                others = sorted(set(owners[differs].tolist()))
                raise ValueError(f"{region.key} differs between rank {rank} and ranks {others}")
            whole[...] = part
            owners[...] = rank
    assert all((o >= 0).all() for o in owner.values()), "some elements are held by no rank"
    return state


def cut(spec: JobSpec, layout: Layout, rank: int, buffers: dict[str, torch.Tensor], state: State) -> None:
    """Fill the buffers of a rank from whole tensors."""
    arrays = {name: bits(buffer) for name, buffer in buffers.items()}
    for region in rank_regions(spec.model, layout, spec.sequence_length, spec.precision, rank):
        _view(arrays, region.buffer, region.offset, region.box)[...] = state[region.key][_inside(region.box)]


def train_from(
    spec: JobSpec, layout: Layout, steps: int, state: State | None = None, records: dict[str, Any] | None = None
) -> tuple[State, dict[str, Any], list[StepResult]]:
    """Train on from a state (None: a fresh start) under `layout`; what came out, merged."""
    text()

    def body(rank: int, store: dist.Store) -> tuple[Buffers, dict[str, Any], list[StepResult]]:
        program = trainer(spec, layout, rank, store)
        buffers = program.initialise()
        if state is not None:
            cut(spec, layout, rank, buffers, state)
        program.bind(buffers)
        if records is not None:
            program.load_records(records)
        results = [program.step(()) for _ in range(steps)]
        return {k: bits(b) for k, b in program.buffers().items()}, program.records(), results

    ranks = run_ranks(layout.num_ranks, body, TIMEOUT_S)
    assert all(r[1:] == ranks[0][1:] for r in ranks)
    return merge(spec, layout, [r[0] for r in ranks]), ranks[0][1], ranks[0][2]


def same_bits(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
