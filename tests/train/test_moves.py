"""What a move must carry besides tensors: step counters, the data position, the learning rate. And generations that
live side by side in one process."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from logical import cut, merge, same_bits, train_from
from ranks import run_ranks
from twins import TIMEOUT_S, gpt, job, llama, max_loss_difference, plan_of, run, text, trainer, twin

from suika.core.job import OptimizerSpec
from suika.core.layout import Layout
from suika.runtime.program import RankGroups
from suika.train.optimizer import learning_rate
from suika.train.program import build

ALONE = RankGroups(None, None, None, None, None)


def test_step_counters_move_and_the_next_update_is_the_same() -> None:
    """B01: 37 steps, then a step after a move to the same layout, to tp2 x pp2 and back to one process."""
    spec = job(gpt(layers=4, tied=False), steps=40)
    state, records, _ = train_from(spec, Layout(), 37)
    unmoved, _, unmoved_results = train_from(spec, Layout(), 38)
    assert records == {"steps_done": 37, "position": 37 * spec.global_batch}

    same, records, results = train_from(spec, Layout(), 1, state, records)
    assert records["steps_done"] == 38
    assert results[-1] == unmoved_results[-1]
    assert same_bits(same, unmoved)

    state, records, results = train_from(spec, Layout(tp=2, pp=2, micro_batch=4), 1, same, records)
    assert results[-1].step == records["steps_done"] == 39
    state, records, results = train_from(spec, Layout(), 1, state, records)
    assert results[-1].step == 40
    assert abs(results[-1].loss - twin(spec, 40)[-1].loss) < 1e-9


def _read(spec: Any, dp: int, position: int) -> list[list[int]]:
    """The windows that each rank of a dp-wide layout reads in the step at `position`."""
    ranks = []
    for rank in range(dp):
        program = build(spec, plan_of(Layout(dp=dp)), rank, ALONE, text())
        program.load_records({"steps_done": position // spec.global_batch, "position": position})
        ranks.append(program.dataset.order.windows(*program.sample_range).tolist())
    return ranks


def test_the_next_global_batch_is_the_same_on_any_number_of_ranks() -> None:
    """B02: batch 4; after one step on one rank, two ranks read samples 4..7, two each."""
    spec = job(gpt(layers=1), global_batch=4)
    (first,) = _read(spec, 1, 4)
    assert _read(spec, 2, 4) == [first[:2], first[2:]]


def test_no_sample_is_lost_or_repeated_when_dp_changes() -> None:
    """B02, long form: batch 12, dp 1, 2, 3, 4, 6, 1 with a move every 5 steps; several epochs."""
    spec = job(gpt(layers=1), global_batch=12, sequence_length=512)
    whole = build(spec, plan_of(Layout()), 0, ALONE, text())
    read: list[int] = []
    for move, dp in enumerate((1, 2, 3, 4, 6, 1) * 3):
        for step in range(5):
            position = (move * 5 + step) * spec.global_batch
            read += [window for rank in _read(spec, dp, position) for window in rank]
    assert read == whole.dataset.order.windows(0, len(read)).tolist()
    num_windows = whole.dataset.order.num_windows
    assert len(read) > 2 * num_windows
    assert sorted(read[:num_windows]) == sorted(read[num_windows : 2 * num_windows]) == list(range(num_windows))


def test_the_learning_rate_depends_on_the_step_alone() -> None:
    """B33: warm-up over 100 steps, cosine to 1,000; the rates that steps report after moves at 40, 100 and 999."""
    optimizer = OptimizerSpec(lr=1e-3, warmup_steps=100, decay="cosine", decay_steps=1000)
    spec = job(gpt(layers=2), optimizer=optimizer, steps=2000, global_batch=6)
    curve = [learning_rate(optimizer, step, spec.steps) for step in range(1001)]
    assert curve[99] == 1e-3
    assert np.isclose(curve[1000], 1e-4)
    assert np.argmax(curve) in (99, 100)

    text()
    for step, layout in ((40, Layout(dp=3)), (40, Layout(dp=2)), (100, Layout(pp=2)), (999, Layout())):
        records = {"steps_done": step, "position": step * spec.global_batch}
        _, _, (result,) = train_from(spec, layout, 1, None, records)
        assert result.lr == curve[step]


def test_a_generation_is_built_beside_a_training_one_and_takes_its_buffers_over() -> None:
    """Four ranks train in one layout while a side thread builds their next one; then the state is handed over in
    memory, old and new live in the same process, and the loss goes on as if nothing had happened."""
    spec = job(llama(), steps=9)
    layouts = (Layout(tp=2, pp=2, micro_batch=4), Layout(pp=2, dp=2, micro_batch=2), Layout(dp=4))
    text()

    def body(rank: int, store: dist.Store) -> list[Any]:
        live = trainer(spec, layouts[0], rank, store, "generation-0")
        live.bind(live.initialise())
        results = [live.step(()) for _ in range(2)]
        for number, layout in enumerate(layouts[1:], start=1):
            aside = ThreadPoolExecutor(1).submit(trainer, spec, layout, rank, store, f"generation-{number}")
            results += [live.step(()) for _ in range(2)]
            new = aside.result(TIMEOUT_S)
            store.set(f"state/{number}/{rank}", _packed(live.buffers()))
            held = [_unpacked(store.get(f"state/{number}/{r}")) for r in range(4)]
            state = merge(spec, layouts[number - 1], held)
            buffers = {k: torch.zeros(shape, dtype=dtype) for k, (shape, dtype) in new.buffer_specs().items()}
            cut(spec, layout, rank, buffers, state)
            new.bind(buffers)
            new.load_records(live.records())
            live = new
            assert all(live.buffers()[name] is buffers[name] for name in buffers)  # bound, not copied
            name = "weight/" + next(name for name, _ in live.stage.chunks[0].named_parameters())
            before = buffers[name].clone()
            results.append(live.step(()))
            assert not torch.equal(before, buffers[name])  # this very memory is trained
        return [*results, live.step(())]

    results = run_ranks(4, body, TIMEOUT_S)
    assert all(r == results[0] for r in results)
    assert max_loss_difference(results[0], twin(spec, 9)) < 1e-9


def _packed(buffers: Any) -> bytes:
    return pickle.dumps({name: buffer.numpy() for name, buffer in buffers.items()})


def _unpacked(data: bytes) -> dict[str, np.ndarray]:
    return pickle.loads(data)


def test_votes_are_summed_over_all_ranks() -> None:
    spec = job(gpt(layers=2, tied=False))
    text()

    def body(rank: int, store: dist.Store) -> tuple[float, ...]:
        program = trainer(spec, Layout(pp=2, dp=2), rank, store)
        program.bind(program.initialise())
        return program.step((1.0, float(rank == 2), 0.0)).votes

    assert run_ranks(4, body) == [(4.0, 1.0, 0.0)] * 4


def test_a_gradient_that_is_not_finite_stops_all_ranks_before_it_reaches_the_weights() -> None:
    spec = job(gpt(layers=2))
    text()

    def body(rank: int, store: dist.Store) -> str:
        program = trainer(spec, Layout(pp=2, dp=2), rank, store)
        buffers = program.initialise()
        if rank == 0:
            buffers["weight/layers.0.mlp.up.bias"][0] = torch.nan
        program.bind(buffers)
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        try:
            program.step(())
        except FloatingPointError as error:
            assert all(torch.equal(before[k].nan_to_num(7), b.nan_to_num(7)) for k, b in buffers.items())
            return str(error)
        return "went on"

    assert {message.split(":")[0] for message in run_ranks(4, body)} == {"step 1"}


def test_runs_do_not_touch_global_state() -> None:
    """No default group, no global random state, no thread count of our own."""
    spec = job(llama(layers=2), "fp32")
    text()

    def body(rank: int, store: dist.Store) -> bool:
        torch.manual_seed(5)
        random = torch.random.get_rng_state()
        program = trainer(spec, Layout(pp=2), rank, store)
        program.bind(program.initialise())
        program.step(())
        return bool(torch.equal(random, torch.random.get_rng_state())) and not dist.is_initialized()

    assert run_ranks(2, body) == [True, True]


def test_twins_are_reproducible() -> None:
    spec = job(gpt(layers=1), "fp32")
    assert run(spec, Layout(), 3) == twin(spec, 3)


def test_binding_other_buffers_changes_what_is_trained() -> None:
    spec = job(gpt(layers=2))
    text()

    def body(rank: int, store: dist.Store) -> list[Any]:
        program = trainer(spec, Layout(), rank, store)
        first, second = program.initialise(), program.initialise()
        program.bind(first)
        result = program.step(())
        program.load_records({"steps_done": 0, "position": 0})
        program.bind(second)
        again = program.step(())
        return [result == again, all(torch.equal(first[name], second[name]) for name in first)]

    assert run_ranks(1, body) == [[True, True]]
