"""Snapshots are written from any layout, read into any other, and are either complete or refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from suika.core.cluster import Device
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.core.redeployment import Phase
from suika.reshard.state import JobShape
from suika.runtime import snapshot
from suika.runtime.events import Ended, Moving, Outcome, Snapshotted, Started
from suika.runtime.gang import Gang, Limits, Member
from suika.runtime.keeper import SnapshotKeeper
from suika.runtime.pieces import pieces
from suika.runtime.program import RankGroups
from suika.runtime.snapshot import SnapshotError

from .conftest import USER, Watched, plan, spec
from .test_moves import assert_state_is_exact
from .tiny_program import TinyProgram

NOBODY = RankGroups(None, None, None, None, None)
LAYOUTS = [
    ("tp=1,pp=1,dp=1", "a0"),
    ("tp=2,pp=1,dp=3", "a0 a1 a2 a3 b0 b1"),
    ("tp=4,pp=1,dp=1", "a0 a1 a2 a3"),
    ("tp=1,pp=2,dp=2,layers_per_stage=1:2", "a0 a1 a2 a3"),
]
MODELS = {
    "llama": {},
    "tied": {"model": {"family": "llama", "layers": 3, "hidden": 16, "ffn": 24, "heads": 4, "vocab": 37, "tied": True}},
    "gpt": {"model": {"family": "gpt", "layers": 3, "hidden": 16, "ffn": 24, "heads": 4, "vocab": 35}},
}


def _filled(job: JobSpec, target: Plan, rank: int) -> TinyProgram:
    program = TinyProgram(job, target, rank, NOBODY, "")
    program.bind(program.initialise())
    return program


def _save(job: JobSpec, target: Plan, snapshots: Path, step: int = 7) -> Path:
    folder, shape = snapshot.folder_of(snapshots, step, 1), JobShape.of(job)
    records = {"steps_done": step, "position": step * job.global_batch}
    captured = []
    for rank in range(target.layout.num_ranks):
        buffers = _filled(job, target, rank).buffers()
        captured.append(snapshot.capture(shape, target, rank, step, records, buffers))
        snapshot.write(folder, captured[-1])
    snapshot.publish(folder, captured[0], 1, "job")
    return folder


@pytest.mark.parametrize("kind", MODELS)
def test_every_layout_reads_what_every_layout_wrote(tmp_path: Path, kind: str) -> None:
    job = spec(**MODELS[kind])
    plans = [plan(*layout, job) for layout in LAYOUTS]
    for number, source in enumerate(plans if kind == "llama" else plans[1::2]):
        folder = _save(job, source, tmp_path, number)
        for target in plans:
            for rank in range(target.layout.num_ranks):
                expected = _filled(job, target, rank).buffers()
                buffers = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
                records = snapshot.load(folder, JobShape.of(job), target, rank, buffers)
                assert records["steps_done"] == number
                for name, tensor in expected.items():
                    assert torch.equal(buffers[name], tensor), (str(source.layout), str(target.layout), name)


def test_every_element_is_written_once_and_the_work_is_shared() -> None:
    job = spec()
    for layout in LAYOUTS:
        target = plan(*layout, job)
        shares = [sum(piece.box.numel for piece in mine) for mine in pieces(JobShape.of(job), target)]
        alone = sum(piece.box.numel for piece in pieces(JobShape.of(job), plan(*LAYOUTS[0], job))[0])
        assert sum(shares) == alone
        assert min(shares) > 0


def test_unfinished_and_damaged_snapshots_are_refused(tmp_path: Path) -> None:
    job, target = spec(), plan(*LAYOUTS[1], spec())
    old, new = _save(job, target, tmp_path, 1), _save(job, target, tmp_path, 2)
    assert snapshot.newest(tmp_path) == new
    largest = max(new.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[:-1])
    with pytest.raises(SnapshotError, match="is not the"):
        snapshot.read_manifest(new)
    assert snapshot.newest(tmp_path) == old
    largest.write_bytes(content)
    assert snapshot.newest(tmp_path) == new
    (new / snapshot.MANIFEST).unlink()
    with pytest.raises(SnapshotError, match="not a finished snapshot"):
        snapshot.load(new, JobShape.of(job), target, 0, {})


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    job, target = spec(), plan(*LAYOUTS[0], spec())
    snapshot.folder_of(tmp_path, 1, 1).mkdir(parents=True)  # never finished
    for step in (2, 3, 4):
        _save(job, target, tmp_path, step)
    kept = [folder.name for folder in sorted(tmp_path.iterdir())]
    assert kept == [snapshot.folder_of(tmp_path, step, 1).name for step in (3, 4)]


def test_a_slow_writer_does_not_lose_the_snapshot_that_overtook_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has written step 20 before the other has finished step 10."""
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(Gang, "tell", lambda self, members, do, **content: told.append((do, content["step"])))
    keeper = SnapshotKeeper(Gang("job", None, lambda *_: None, Limits()))  # type: ignore[arg-type]
    ranks = {device: Member(str(device), device, 0.0) for device in (Device("a", 0), Device("a", 1))}
    quick, slow = ranks.values()

    def say(member: Member, word: str, step: int) -> Snapshotted | None:
        message = {"say": word, "generation": 1, "step": step, "stall_s": 0.1, "path": f"/{step}", "error": "late"}
        return keeper.hear(ranks, member, message)

    for member, step in ((quick, 10), (quick, 20), (slow, 10), (slow, 20)):
        assert say(member, "written", step) is None
    assert told == [("publish", 20)]
    assert say(slow, "unwritten", 10) is None
    assert keeper.busy
    assert keeper.error is None
    complete = say(quick, "published", 20)
    assert complete is not None
    assert (complete.step, keeper.newest, keeper.busy) == (20, ("/20", 20), False)


def test_words_that_are_told_again_begin_no_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new controller hears that rank 0 has published before it hears that rank 1 had written."""
    monkeypatch.setattr(Gang, "tell", lambda *_, **content: None)
    keeper = SnapshotKeeper(Gang("job", None, lambda *_: None, Limits()))  # type: ignore[arg-type]
    ranks = {device: Member(str(device), device, 0.0) for device in (Device("a", 0), Device("a", 1))}
    first, second = ranks.values()
    message = {"generation": 1, "step": 10, "stall_s": 0.1, "path": "/10"}
    keeper.hear(ranks, first, {**message, "say": "written"})
    assert keeper.hear(ranks, first, {**message, "say": "published"}) is not None
    assert keeper.hear(ranks, second, {**message, "say": "written"}) is None
    assert not keeper.busy, "nothing more will come: a move, or the job's end, would wait for it"
    keeper.hear(ranks, second, {**message, "say": "written", "step": 20})
    assert keeper.busy


def test_a_snapshot_that_is_published_during_a_commit_counts(run: Callable[..., Watched]) -> None:
    job_run, rank = run(spec()), Member("rank", Device("a", 0), 0.0)
    job_run.generation = 2
    job_run._hear(rank, {"say": "published", "generation": 1, "step": 10, "path": "/10"})
    assert job_run.keeper.newest == ("/10", 10)
    job_run._hear(rank, {"say": "published", "generation": 1, "step": 5, "path": "/5"})
    assert job_run.keeper.newest == ("/10", 10)
    assert [event.step for event in job_run.events if isinstance(event, Snapshotted)] == [10]


def test_a_job_saves_at_its_interval_and_when_asked(run: Callable[..., Watched]) -> None:
    job = spec(steps=30, snapshot_every_steps=10)
    job_run = run(job)
    job_run.start(plan("tp=2,pp=1,dp=1", "a0 a1", job), 1).result(60)
    asked = Path(job_run.snapshot().result(30))
    assert snapshot.read_manifest(asked)["plan"]["devices"] == ["a/0", "a/1"]
    assert job_run.wait(Ended).outcome == Outcome.FINISHED
    steps = [event.step for event in job_run.events if isinstance(event, Snapshotted)]
    assert len(steps) == 4
    assert steps[-1] == 30
    # What is due while the one before is still being written comes a little later.
    assert all(any(due <= step < due + 10 for step in steps) for due in (10, 20))


def test_a_preempted_job_resumes_in_another_layout(run: Callable[..., Watched]) -> None:
    job = spec(steps=40)
    job_run = run(job)
    job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60)
    job_run.wait_steps(3)
    ended = job_run.preempt().result(30)
    assert (ended.outcome, ended.steps_lost) == (Outcome.PREEMPTED, 0)
    job_run.start(plan("tp=1,pp=3,dp=1", "b0 b1 b2", job), 2, ended.snapshot).result(60)
    assert job_run.wait(Started, generation=2).resumed_step == ended.step
    assert job_run.wait(Ended, outcome=Outcome.FINISHED).step == 40


def test_a_notice_with_time_enough_loses_nothing(run: Callable[..., Watched]) -> None:
    """B60: the notice comes while the job is still starting."""
    job = spec()
    job_run = run(job)
    job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1)
    ended = job_run.preempt(deadline_s=30).result(40)
    assert (ended.outcome, ended.steps_lost, ended.error) == (Outcome.PREEMPTED, 0, None)
    job_run.start(plan("tp=1,pp=1,dp=1", "b0", job), 2, ended.snapshot).result(60)
    job_run.wait_steps(1)  # an old deadline means nothing to a new life


@pytest.mark.parametrize("when", ["training", "moving"])
def test_what_cannot_be_saved_in_time_is_given_up(run: Callable[..., Watched], when: str) -> None:
    """B60: a rank hangs, so that no step ends any more: at the deadline all devices are free, and the loss is told."""
    job = spec(snapshot_every_steps=5)
    job_run = run(job, limits=Limits(silent_s=60))
    job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60)
    kept = job_run.wait(Snapshotted)
    if when == "moving":
        stop = partial(os.kill, job_run.pid("b0"), signal.SIGSTOP)
        job_run.hook = lambda event: stop() if isinstance(event, Moving) and event.record.phase == Phase.MOVE else None
        job_run.redeploy(plan("tp=1,pp=1,dp=2", "a0 b0", job), 2, USER)
        job_run.wait(Moving)
    else:
        os.kill(job_run.pid("b0"), signal.SIGSTOP)
    began_s = time.monotonic()
    ended = job_run.preempt(deadline_s=2).result(30)
    assert time.monotonic() - began_s < 5
    assert ended.outcome == Outcome.PREEMPTED
    assert ended.snapshot_step >= kept.step
    assert "could not be saved in time" in ended.error
    assert not job_run.gang.members


def test_a_notice_to_one_rank_stops_all_after_the_same_step(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60)
    os.kill(job_run.pid("b0"), signal.SIGTERM)
    ended = job_run.wait(Ended, timeout_s=30)
    assert (ended.outcome, ended.steps_lost) == (Outcome.PREEMPTED, 0)


def test_a_disk_that_hangs_holds_no_step_up(run: Callable[..., Watched], tmp_path: Path) -> None:
    """The next snapshots are due while the first one is still being written: they wait, training does not."""
    job = spec(snapshot_every_steps=3)
    job_run = run(job)
    (tmp_path / "slow-disk").touch()
    job_run.start(plan("tp=2,pp=1,dp=1", "a0 a1", job), 1).result(60)
    job_run.wait_steps(12)
    assert not [event for event in job_run.events if isinstance(event, Snapshotted)]
    reached = job_run.step
    (tmp_path / "slow-disk").unlink()
    assert job_run.wait(Snapshotted).step == 3
    job_run.wait_steps(6)
    ended = job_run.preempt().result(60)
    saved = [event.step for event in job_run.events if isinstance(event, Snapshotted)]
    assert saved[1] >= reached, "what was due is taken as soon as the disk is free"
    assert saved[-1] == ended.step
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)


def test_a_full_disk_does_not_end_training(run: Callable[..., Watched], tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file where a folder should be")
    job = spec(snapshot_every_steps=4)
    job_run = run(job)
    job_run.start(plan("tp=1,pp=1,dp=2", "a0 b0", job), 1).result(60)
    job_run.wait_steps(12)
    ended = job_run.preempt().result(30)
    assert ended.snapshot is None
    assert ended.steps_lost == ended.step
    assert "snapshot failed" in ended.error
