"""Moves of a running job in pieces: exact, called off with everything carried back, or lost to a death and told so."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from suika.core.redeployment import Phase
from suika.runtime.events import Ended, Outcome, Snapshotted, StepDone

from .conftest import USER, Watched, plan, spec
from .test_moves import STAGES, assert_state_is_exact
from .tiny_program import FAULT

OLD = ("tp=2,pp=1,dp=2", "a0 a1 b0 b1")
NEW = ("tp=1,pp=3,dp=1", "a0 b0 b2")


def test_a_chain_of_lean_moves_keeps_every_bit(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*STAGES[0], job), 1).result(60)
    for generation, stage in enumerate(STAGES[1:4], start=2):
        record = job_run.redeploy(plan(*stage, job), generation, USER, mode="lean").result(60)
        assert (record.phase, record.error) == (Phase.RELEASE, None)
        assert record.moved_bytes >= record.bound_bytes
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)


def test_a_refused_commit_carries_every_piece_back(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*OLD, job), 1).result(60)
    record = job_run.redeploy(plan(*NEW, job), 2, USER, lambda: False, mode="lean").result(60)
    assert record.phase == Phase.ABORTED
    job_run.wait(StepDone, generation=1, step=record.cut_step + 1)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)


def test_a_death_on_the_way_falls_back_to_the_snapshot(run: Callable[..., Watched], tmp_path: Path) -> None:
    """The joiner is, for some pieces, the only owner by then."""
    job = spec(snapshot_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*OLD, job), 1).result(60)
    job_run.wait(Snapshotted)
    (tmp_path / FAULT).write_text(json.dumps({"at": ["bind", "b/2", 3], "do": "SIGKILL"}))
    assert job_run.redeploy(plan(*NEW, job), 2, USER, mode="lean").exception(60) is not None
    ended = job_run.wait(Ended)
    assert (ended.outcome, [str(device) for device in ended.dead]) == (Outcome.LOST, ["b/2"])
    assert ended.steps_lost == ended.step - ended.snapshot_step < 100
    (tmp_path / FAULT).unlink()
    job_run.start(plan("tp=1,pp=1,dp=3", "a2 a3 b3", job), 3, ended.snapshot).result(60)
    job_run.wait_steps(2)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)


def test_a_failure_on_the_way_back_is_a_loss(run: Callable[..., Watched], tmp_path: Path) -> None:
    job = spec(snapshot_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*OLD, job), 1).result(60)
    job_run.wait(Snapshotted)

    def refuse() -> bool:
        (tmp_path / FAULT).write_text(json.dumps({"at": ["bind", "a/0", 4], "do": "refuse"}))
        return False

    error = str(job_run.redeploy(plan(*NEW, job), 2, USER, refuse, mode="lean").exception(30))
    assert "the owner's record of the job has changed; then, on the way back" in error
    ended = job_run.wait(Ended)
    assert ended.outcome == Outcome.LOST
    (tmp_path / FAULT).unlink()
    job_run.start(plan(*NEW, job), 3, ended.snapshot).result(60)
    job_run.wait_steps(2)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)
