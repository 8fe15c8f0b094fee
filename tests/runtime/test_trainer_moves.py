"""The built-in trainer, moved while it trains, against the same job in one process that never moves."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from suika.backends.local import LocalBackend
from suika.core.job import JobSpec
from suika.runtime.coordinator import PROGRAM
from suika.runtime.events import Ended, Measured, Outcome, StepDone
from suika.train.data import prepare

from .conftest import CLUSTER, USER, Watched, plan, spec

LLAMA = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 257}
GPT = {"family": "gpt", "layers": 3, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257, "tied": True, "dropout": 0.1}
GPT |= {"lora": {"rank": 3, "targets": ["q", "o", "up"]}, "frozen": ["layers.*", "positions.*"]}
STEPS = 60
CHAIN = [
    ("tp=1,pp=2,dp=2", "a0 a1 b0 b1"),
    ("tp=2,pp=1,dp=1", "b0 a1"),  # shrink, other axes
    ("tp=1,pp=2,dp=1,layers_per_stage=2:{rest}", "a2 b3"),  # disjoint devices, uneven stages
    ("tp=1,pp=1,dp=3", "a2 b3 b0"),  # grow; 8 micro-batches over 3
    ("tp=2,pp=2,dp=1", "b0 b1 b2 b3"),
]


MIXTURE = LLAMA | {"experts": 4, "experts_per_token": 2, "expert_ffn": 16, "first_dense_layers": 3, "dropout": 0.1}
WIDER_CHAIN = [
    ("pp=2,virtual_stages=2,micro_batch=4", "a0 b0"),
    ("dp=4,ep=2,zero=3,micro_batch=2", "a0 b0 a1 b1"),  # weights in slices
    ("dp=2,cp=2,ep=4,micro_batch=4", "a1 a0 b2 b3"),  # other experts, other parts of sequences
    ("pp=2,virtual_stages=2,micro_batch=4,zero_buckets=stage", "b1 a1"),
]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    with LocalBackend(CLUSTER, tmp_path_factory.mktemp("run"), preload=("suika.train.program",)) as running:
        yield running


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "stdlib.bin"
    prepare(sysconfig.get_paths()["stdlib"], path, pattern="*.py", max_bytes=200_000)
    return str(path)


def _job(model: dict[str, Any]) -> JobSpec:
    optimizer = {"lr": 3e-3, "warmup_steps": 2}
    return spec(model=model, global_batch=8, sequence_length=16, steps=STEPS, seed=3, optimizer=optimizer)


class Trained(Watched):
    """A job of the real trainer."""

    def losses(self) -> dict[int, float]:
        ended = self.wait(Ended, timeout_s=90)
        assert ended.outcome == Outcome.FINISHED, ended.error
        return {event.step: event.loss for event in self.events if isinstance(event, StepDone)}


@pytest.mark.parametrize("model", [LLAMA, pytest.param(GPT, marks=pytest.mark.fault)], ids=["llama", "gpt-tied"])
def test_losses_are_those_of_the_unmoved_twin(
    trainers: LocalBackend, data: str, tmp_path: Path, model: dict[str, Any]
) -> None:
    job = _job(model)

    def begin(name: str, layout: tuple[str, str]) -> Trained:
        job_run = Trained(job, trainers, tmp_path / name, program=PROGRAM, data_path=data)
        job_run.start(plan(*layout, job), 1).result(60)
        return job_run

    moved = begin("moved", CHAIN[0])
    for generation, (layout, devices) in enumerate(CHAIN[1:], start=2):
        target = plan(layout.format(rest=model["layers"] - 2), devices, job)
        record = moved.redeploy(target, generation, USER).result(90)
        assert record.error is None
        assert record.moved_bytes >= record.bound_bytes > 0
    losses = moved.losses()
    twin = begin("twin", ("tp=1,pp=1,dp=1", "a0")).losses()
    assert sorted(losses) == sorted(twin) == list(range(1, STEPS + 1))
    assert max(abs(losses[step] - twin[step]) for step in twin) < 1e-9
    pauses = [event.record.pause_s for event in moved.events if isinstance(event, Measured)]
    assert len(pauses) == len(CHAIN) - 1
    moved.close()


def test_moves_in_all_dimensions(trainers: LocalBackend, data: str, tmp_path: Path) -> None:
    """As above for interleaved stages, experts over ep and sequences over cp; then the state of the last layout is
    saved and goes on in another one."""
    job = _job(MIXTURE).model_copy(update={"steps": 100_000})

    def begin(job_run: Trained, place: tuple[str, str], generation: int, snapshot: str | None = None) -> None:
        job_run.start(plan(*place, job), generation, snapshot).result(60)

    moved, twin = (
        Trained(job, trainers, tmp_path / name, program=PROGRAM, data_path=data) for name in ("moved", "twin")
    )
    begin(moved, WIDER_CHAIN[0], 1)
    for generation, place in enumerate(WIDER_CHAIN[1:], start=2):
        record = moved.redeploy(plan(*place, job), generation, USER).result(90)
        assert record.error is None
        assert record.moved_bytes >= record.bound_bytes > 0
    saved = moved.preempt().result(60)
    begin(moved, WIDER_CHAIN[2], 5, saved.snapshot)
    moved.wait_steps(2)
    moved.close()
    begin(twin, ("dp=1", "a0"), 1)
    twin.wait_steps(moved.step - twin.step, 60)
    twin.close()
    losses, expected = (
        {event.step: event.loss for event in run.events if isinstance(event, StepDone)} for run in (moved, twin)
    )
    assert sorted(losses) == list(range(1, moved.step + 1))
    assert max(abs(losses[step] - expected[step]) for step in losses) < 1e-9


def test_it_goes_on_from_its_snapshot(trainers: LocalBackend, data: str, tmp_path: Path) -> None:
    """Killed and started again in another layout, the losses are those of a run that nobody touched."""
    import os
    import signal

    job = _job(LLAMA | {"lora": {"rank": 2}}).model_copy(update={"snapshot_every_steps": 3})
    job_run = Trained(job, trainers, tmp_path / "killed", program=PROGRAM, data_path=data)
    job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60)
    job_run.wait_steps(5)
    os.kill(job_run.pid("b0"), signal.SIGKILL)
    lost = job_run.wait(Ended)
    assert lost.outcome == Outcome.LOST
    before = {event.step: event.loss for event in job_run.events if isinstance(event, StepDone)}
    job_run.events.clear()
    job_run.start(plan("tp=1,pp=3,dp=1", "a0 a1 b1", job), 2, lost.snapshot).result(60)
    after = job_run.losses()
    assert min(after) == lost.snapshot_step + 1
    again = [step for step in after if step in before]
    assert all(abs(after[step] - before[step]) < 1e-9 for step in again)
    twin = Trained(job, trainers, tmp_path / "twin", program=PROGRAM, data_path=data)
    twin.start(plan("tp=1,pp=1,dp=1", "a0", job), 1).result(60)
    expected = twin.losses()
    assert max(abs({**before, **after}[step] - expected[step]) for step in expected) < 1e-9


def test_a_move_in_the_same_layout_changes_no_bit(trainers: LocalBackend, data: str, tmp_path: Path) -> None:
    """B01: masters, moments, step counter and learning rate are where they were: every later loss and norm is equal."""
    layout, job = "tp=1,pp=2,dp=2", _job(LLAMA).model_copy(update={"steps": 80})  # enough for a slow preparation

    def run(name: str, moves: list[str]) -> dict[int, tuple[float, float, float]]:
        job_run = Trained(job, trainers, tmp_path / name, program=PROGRAM, data_path=data)
        job_run.start(plan(layout, "a0 a1 b0 b1", job), 1).result(60)
        for generation, devices in enumerate(moves, start=2):
            assert job_run.redeploy(plan(layout, devices, job), generation, USER).result(90).error is None
        job_run.losses()  # all of its steps are done
        done = {e.step: (e.loss, e.grad_norm, e.lr) for e in job_run.events if isinstance(e, StepDone)}
        job_run.close()
        return done

    assert run("moved", ["a2 a3 b2 b3", "b3 b2 a3 a2"]) == run("unmoved", [])
