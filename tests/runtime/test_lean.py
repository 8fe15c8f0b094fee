"""Moves of a running job in pieces: exact, called off with everything carried back, or lost to a death and told so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from suika.backends.local import LocalBackend
from suika.core.errors import SpecError
from suika.core.job import JobSpec
from suika.core.redeployment import Phase
from suika.reshard.links import Links
from suika.reshard.modes import fitting_mode
from suika.reshard.moveplan import plan_move
from suika.reshard.state import JobShape
from suika.runtime.events import Ended, Outcome, Snapshotted, StepDone

from .conftest import CLUSTER, MODEL, USER, Watched, plan, spec
from .test_moves import STAGES, assert_state_is_exact
from .tiny_program import lay_ready

OLD = ("tp=2,pp=1,dp=2", "a0 a1 b0 b1")
NEW = ("tp=1,pp=3,dp=1", "a0 b0 b2")


def test_a_chain_of_lean_moves_keeps_every_bit(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*STAGES[0], job), 1).result(60)
    for generation, stage in enumerate(STAGES[1:4], start=2):
        record = job_run.redeploy(plan(*stage, job), generation, USER, mode="lean").result(60)
        assert (record.phase, record.mode, record.error) == (Phase.RELEASE, "lean", None)
        assert record.moved_bytes >= record.bound_bytes
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)


def _needed(job: JobSpec, mode: str) -> int:
    """The least memory that each node must have for the move from OLD to NEW in `mode`."""
    move = plan_move(JobShape.of(job), plan(*OLD, job), plan(*NEW, job), CLUSTER)
    low, high = 0, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            fits = fitting_mode(move, Links(CLUSTER, move.participants), [middle] * len(move.participants))
        except SpecError:
            fits = "neither"
        low, high = (low, middle) if fits in (mode, "keep") else (middle + 1, high)
    return low


def test_what_does_not_fit_side_by_side_goes_in_pieces_or_not_at_all(backend: LocalBackend, tmp_path: Path) -> None:
    """Nobody says how: the memory decides, and what cannot be is refused before anything stops."""
    job = spec(model={**MODEL, "layers": 4, "hidden": 192, "ffn": 512})  # some pieces of two chunks
    lean, keep = _needed(job, "lean"), _needed(job, "keep")
    assert lean < keep
    for folder, available, mode in (("keep", keep, "keep"), ("lean", keep - 1, "lean"), ("none", lean - 1, None)):
        (tmp_path / folder).mkdir()
        job_run = Watched(job, backend, tmp_path / folder)
        job_run.start(plan(*OLD, job), 1).result(60)
        (tmp_path / folder / "available").write_text(str(available))
        record = job_run.redeploy(plan(*NEW, job), 2, USER).result(60)
        assert record.phase == (Phase.RELEASE if mode else Phase.ABORTED)
        assert record.mode == (mode or "keep")
        if mode is None:
            assert f"{lean - 1:,} are available" in record.error
            assert record.cut_step is None
        last = job_run.preempt().result(60)
        job_run.close()
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
    lay_ready(tmp_path, {"at": ["bind", "b/2", 3], "do": "SIGKILL"})
    assert job_run.redeploy(plan(*NEW, job), 2, USER, mode="lean").exception(60) is not None
    ended = job_run.wait(Ended)
    assert (ended.outcome, [str(device) for device in ended.dead]) == (Outcome.LOST, ["b/2"])
    assert ended.steps_lost == ended.step - ended.snapshot_step < 100
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
        lay_ready(tmp_path, {"at": ["bind", "a/0", 4], "do": "refuse"})
        return False

    error = str(job_run.redeploy(plan(*NEW, job), 2, USER, refuse, mode="lean").exception(30))
    assert "the owner's record of the job has changed; then, on the way back" in error
    ended = job_run.wait(Ended)
    assert ended.outcome == Outcome.LOST
    job_run.start(plan(*NEW, job), 3, ended.snapshot).result(60)
    job_run.wait_steps(2)
    last = job_run.preempt().result(60)
    assert_state_is_exact(Path(last.snapshot), job, last.step)
