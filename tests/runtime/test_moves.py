"""A running job goes from layout to layout, device set to device set, and keeps every bit of its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from suika.core.job import JobSpec
from suika.core.redeployment import Phase
from suika.core.tensors import logical_tensors
from suika.reshard.regions import Box
from suika.reshard.state import JobShape, StateKey, buffer_specs
from suika.runtime import snapshot
from suika.runtime.dcp_plan import region_view
from suika.runtime.events import Ended, Outcome, StepDone
from suika.runtime.pieces import plan_regions

from .conftest import USER, Watched, plan, spec
from .tiny_program import advance, first_values

STAGES = [
    ("tp=2,pp=1,dp=2", "a0 a1 b0 b1"),
    ("tp=1,pp=3,dp=1", "a0 a1 b0"),  # shrink
    ("tp=2,pp=2,dp=1,layers_per_stage=2:1", "b3 b2 a3 a2"),  # all other devices, uneven stages
    ("tp=1,pp=1,dp=3", "b3 b2 a0"),  # a degree that does not divide the batch's micro-batches evenly into tp's halves
    ("tp=2,pp=1,dp=2", "a0 b3 b2 a1"),  # grow
    ("tp=1,pp=1,dp=1", "a1"),
    ("tp=1,pp=1,dp=1,micro_batch=2", "a1"),  # nothing moves at all
    ("tp=4,pp=1,dp=1", "a0 a1 a2 a3"),
]


def assert_state_is_exact(folder: Path, job: JobSpec, step: int) -> None:
    """Every element of the snapshot has the value that its own recurrence gives, to the bit."""
    shape, alone = JobShape.of(job), plan("tp=1,pp=1,dp=1", "a0", job)
    specs = buffer_specs(job.model, alone.layout, job.sequence_length, job.precision, 0)
    buffers = {name: torch.full(size, torch.nan, dtype=getattr(torch, dtype)) for name, (size, dtype) in specs.items()}
    assert snapshot.load(folder, shape, alone, 0, buffers)["steps_done"] == step
    shapes = {t.name: t.shape for t in logical_tensors(job.model, job.sequence_length)}
    seen: dict[StateKey, int] = {}
    for region in plan_regions(shape, alone, 0):
        expected = first_values(region.key, shapes[region.key.tensor], region.box)
        for done in range(step):
            advance(expected, done)
        assert torch.equal(region_view(region, buffers), expected), region.key
        seen[region.key] = seen.get(region.key, 0) + region.box.numel
    assert all(numel == Box.whole(shapes[key.tensor]).numel for key, numel in seen.items())


def test_a_chain_of_moves_keeps_every_bit(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    plans = [plan(*stage, job) for stage in STAGES]
    job_run.start(plans[0], 1).result(60)
    for generation, target in enumerate(plans[1:], start=2):
        record = job_run.redeploy(target, generation, USER).result(60)
        assert (record.phase, record.error) == (Phase.RELEASE, None)
        assert record.cut_step is not None
        job_run.wait(StepDone, generation=generation, step=record.cut_step + 1)
    job_run.preempt().result(60)
    ended = job_run.wait(Ended)
    assert (ended.outcome, ended.steps_lost) == (Outcome.PREEMPTED, 0)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)
    steps = [event.step for event in job_run.events if isinstance(event, StepDone)]
    assert steps == list(range(1, ended.step + 1)), "no step is lost and none is done twice"


def test_a_move_may_follow_another_at_once(run: Callable[..., Watched]) -> None:
    """The order for the next one comes while a rank is still going over to the generation just committed."""
    job = spec()
    job_run = run(job)
    places = [plan(layout, "a0 a1 b0 b1", job) for layout in ("tp=2,pp=1,dp=2", "tp=1,pp=1,dp=4")]
    job_run.start(places[0], 1).result(60)
    moves = [job_run.redeploy(places[generation % 2 == 0], generation, USER) for generation in range(2, 14)]
    assert [move.result(60).error for move in moves] == [None] * 12
    ended = job_run.preempt().result(60)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)
