"""The next gradients are computed while masters and moments stream: the same bits, and an abort loses nothing."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from pathlib import Path

from suika.backends.local import LocalBackend
from suika.core.redeployment import Phase
from suika.runtime.coordinator import PROGRAM
from suika.runtime.events import Ended, StepDone
from suika.train.data import prepare

from .conftest import USER, Watched, plan, spec
from .test_moves import STAGES, assert_state_is_exact
from .tiny_program import lay_ready

MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 257}


def test_every_bit_is_kept(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*STAGES[0], job), 1).result(60)
    for generation, stage in enumerate(STAGES[1:4], start=2):
        record = job_run.redeploy(plan(*stage, job), generation, USER, weights_first=True).result(60)
        assert (record.phase, record.error) == (Phase.RELEASE, None)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)


def test_a_death_in_the_provisional_pass_leads_back_to_the_same_step(
    run: Callable[..., Watched], tmp_path: Path
) -> None:
    """A joiner dies while gradients are computed and moments stream: the old generation takes the very next step."""
    job = spec()
    job_run = run(job)
    job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60)
    lay_ready(tmp_path, {"at": ["begin", "b/2", 3], "do": "SIGKILL"})
    record = job_run.redeploy(plan("tp=1,pp=3,dp=1", "a0 b0 b2", job), 2, USER, weights_first=True).result(60)
    assert record.phase == Phase.ABORTED
    assert record.cut_step is not None
    job_run.wait(StepDone, generation=1, step=record.cut_step + 1)
    again = job_run.redeploy(plan("tp=1,pp=3,dp=1", "a0 b0 b2", job), 3, USER, weights_first=True).result(60)
    assert again.phase == Phase.RELEASE
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)
    steps = [event.step for event in job_run.events if isinstance(event, StepDone)]
    assert steps == list(range(1, last.step + 1))


def test_gradients_of_the_provisional_pass_are_the_steps_own(backend: LocalBackend, tmp_path: Path) -> None:
    """The built-in trainer, moved to other devices in the same layout: every later loss is that of the twin."""
    prepare(sysconfig.get_paths()["stdlib"], tmp_path / "text.bin", pattern="*.py", max_bytes=100_000)
    job = spec(
        model=MODEL, global_batch=8, sequence_length=16, steps=60, seed=3
    )  # more than go by while the move is prepared

    def losses(name: str, moves: list[str]) -> dict[int, tuple[float, float]]:
        data = str(tmp_path / "text.bin")
        job_run = Watched(job, backend, tmp_path / name, program=PROGRAM, data_path=data)
        job_run.start(plan("tp=1,pp=2,dp=2", "a0 a1 b0 b1", job), 1).result(60)
        for generation, devices in enumerate(moves, start=2):
            target = plan("tp=1,pp=2,dp=2", devices, job)
            assert job_run.redeploy(target, generation, USER, weights_first=True).result(60).error is None
        job_run.wait(Ended)
        job_run.close()
        return {e.step: (e.loss, e.grad_norm) for e in job_run.events if isinstance(e, StepDone)}

    assert losses("moved", ["b0 b1 a2 a3"]) == losses("unmoved", [])
