"""B52: micro-batch counts around the number of stages, and shares that differ between data-parallel ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from logical import train_from
from torch.distributed.pipelining import Schedule1F1B
from twins import gpt, job, llama, max_loss_difference, plan_of, run, text, twin

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.runtime.program import RankGroups
from suika.train.axis import Axis, TensorParallel
from suika.train.parallel import Parallel
from suika.train.pipeline import StagedPipeline
from suika.train.program import build
from suika.train.stage import Stage


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 5])
def test_four_stages_with_few_micro_batches(num_micro_batches: int) -> None:
    spec = job(gpt(), global_batch=num_micro_batches)
    layout = Layout(pp=4)
    if num_micro_batches < 4:
        groups = RankGroups(None, None, None, None, None)
        with pytest.raises(SpecError, match=rf"smallest dp rank has {num_micro_batches} micro-batches for pp\(4\)"):
            build(spec, plan_of(layout), 0, groups, text())
    else:
        assert max_loss_difference(run(spec, layout, 3), twin(spec, 3)) < 1e-9


def test_a_batch_of_eight_on_three_pipelines() -> None:
    spec = job(gpt(layers=2))
    assert max_loss_difference(run(spec, Layout(pp=2, dp=3), 3), twin(spec, 3)) < 1e-9


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(cp=3), "layout.cp"),
        (Layout(zero=2), "layout.zero"),
        (Layout(dp=3, zero=3), "layout.zero"),
        (Layout(pp=2, virtual_stages=2, dp=4, micro_batch=2), "layout"),
        (Layout(pp=2, virtual_stages=3), "layout.pp"),
        (Layout(tp=3), "layout.tp"),
    ],
)
def test_what_cannot_run_is_refused_with_its_field(layout: Layout, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        build(job(gpt()), plan_of(layout), 0, RankGroups(None, None, None, None, None), text())
    assert refused.value.field == field


DEPTHS = [(pp, v, rounds * pp) for pp, v, rounds in product((2, 3, 4), (2, 3), (1, 2, 5))]


def _interleaved(pp: int, virtual_stages: int, num_micro_batches: int) -> dict[int, list]:
    """What each rank does in a step, sends and receives included, as its schedule says."""
    model, layout = llama(layers=pp * virtual_stages), Layout(pp=pp, virtual_stages=virtual_stages)
    parallel = Parallel(TensorParallel(Axis("tp")), Axis("cp"), Axis("ep"))
    stage = Stage(model, layout, Mesh(layout).coordinate(0), 8, torch.float32, parallel)
    schedule = StagedPipeline(stage, num_micro_batches, 1, Axis("pp", None, pp, 0)).schedule
    assert not isinstance(schedule, Schedule1F1B)
    return schedule.pipeline_order_with_comms


@pytest.mark.parametrize(("pp", "virtual_stages", "num_micro_batches"), DEPTHS)
def test_interleaved_ranks_compute_in_megatrons_order(pp: int, virtual_stages: int, num_micro_batches: int) -> None:
    """Warm-up of 2 (pp - rank - 1) + (v - 1) pp forwards, then one backward after each forward; forwards take pp
    micro-batches through a chunk before the next one, backwards through the chunks in reverse."""
    total = virtual_stages * num_micro_batches
    for rank, actions in _interleaved(pp, virtual_stages, num_micro_batches).items():
        done = [a for a in actions if a.computation_type.value in ("F", "B")]
        forward = [(a.stage_index // pp, a.microbatch_index) for a in done if a.computation_type.value == "F"]
        backward = [(a.stage_index // pp, a.microbatch_index) for a in done if a.computation_type.value == "B"]
        rounds = range(0, num_micro_batches, pp)
        chunks = range(virtual_stages)
        assert forward == [(c, m) for first in rounds for c in chunks for m in range(first, first + pp)]
        assert backward == [(c, m) for first in rounds for c in reversed(chunks) for m in range(first, first + pp)]
        warm = min(total, 2 * (pp - rank - 1) + (virtual_stages - 1) * pp)
        kinds = "".join(a.computation_type.value for a in done)
        assert kinds == "F" * warm + "FB" * (total - warm) + "B" * warm


@pytest.mark.parametrize(("pp", "virtual_stages", "num_micro_batches"), DEPTHS)
def test_interleaved_messages_arrive_in_the_order_in_which_they_are_sent(
    pp: int, virtual_stages: int, num_micro_batches: int
) -> None:
    """Messages between two ranks carry no name: the receiver must post its buffers as the sender sends. With pp = 2
    both directions of all chunks go between the same pair. Sends never block, so this is all that a deadlock could
    hang on: the schedule is carried out here with one queue per ordered pair."""
    actions = {rank: list(done) for rank, done in _interleaved(pp, virtual_stages, num_micro_batches).items()}
    queues: dict[tuple[int, int], list[tuple[str, int, int]]] = {pair: [] for pair in product(range(pp), repeat=2)}
    while any(actions.values()):
        moved = False
        for rank, todo in actions.items():
            while todo:
                kind, chunk, micro_batch = todo[0].computation_type.value, todo[0].stage_index, todo[0].microbatch_index
                ahead = 1 if kind.endswith("_F") else -1
                if kind.startswith("SEND"):
                    queues[rank, (chunk + ahead) % pp].append((kind[-1], chunk + ahead, micro_batch))
                if kind.startswith("RECV"):
                    queue = queues[(chunk - ahead) % pp, rank]
                    if not queue:
                        break
                    assert queue.pop(0) == (kind[-1], chunk, micro_batch)
                todo.pop(0)
                moved = True
        assert moved, "every rank waits for another"
    assert not any(queues.values())


def test_moves_between_interleaved_and_plain_stages() -> None:
    """The state after each stop, cut up for the next layout: losses are those of one process that never stopped."""
    spec = job(gpt())
    chain = [
        Layout(pp=2, virtual_stages=2, dp=2, zero_buckets="stage"),
        Layout(pp=2, layers_per_stage=(3, 1)),
        Layout(pp=2, virtual_stages=2, tp=2),
        Layout(),
    ]
    state, records, results = None, None, []
    for layout in chain:
        state, records, more = train_from(spec, layout, 2, state, records)
        results += more
    assert max_loss_difference(results, twin(spec, 8)) < 1e-9


def test_interleaved_chunks_may_differ_in_size() -> None:
    spec = job(llama(layers=6), global_batch=6)
    layout = Layout(pp=3, virtual_stages=2, layers_per_stage=(1,) * 6)
    assert max_loss_difference(run(spec, layout, 3), twin(spec, 3)) < 1e-9
    uneven = Layout(pp=2, virtual_stages=2, layers_per_stage=(1, 3, 1, 1))
    assert max_loss_difference(run(spec, uneven, 3), twin(spec, 3)) < 1e-9
