"""B21: ranks die or stop at every stage of a job's life: the rest never hangs, nothing is lost that could be kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from suika.core.cluster import Device
from suika.core.redeployment import Phase
from suika.runtime.events import Ended, JobEvent, Moving, Outcome, Released, Snapshotted, Started, StepDone
from suika.runtime.gang import DiedError

from .conftest import USER, Watched, plan, spec
from .test_moves import assert_state_is_exact

FOUR = ("tp=2,pp=1,dp=2", "a0 a1 b0 b1")
FAULT = pytest.mark.fault  # the same once more, elsewhere: for make test-faults
THREE = ("tp=1,pp=3,dp=1", "a0 b0 b2")  # two stay, two leave, one joins


def _kill_in(job_run: Watched, phase: Phase, device: str, number: int = signal.SIGKILL) -> None:
    """Signal the process on `device` when the move enters `phase`; the job's thread waits meanwhile."""

    def hook(event: JobEvent) -> None:
        if isinstance(event, Moving) and event.record.phase == phase:
            place = Device(device[0], int(device[1:]))
            member = next(m for m in job_run.gang.members.values() if m.device == place)
            while member.pid is None:
                job_run.gang.pump()
            os.kill(member.pid, number)

    job_run.hook = hook


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("device", [pytest.param("a0", marks=FAULT), "b1"])
def test_a_rank_dies_while_training(run: Callable[..., Watched], device: str) -> None:
    job = spec(snapshot_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    saved = job_run.wait(Snapshotted)
    job_run.wait_steps(3)
    pids = [job_run.pid(name) for name in FOUR[1].split()]
    assert {os.sched_getscheduler(pid) for pid in pids} == {os.SCHED_BATCH}, "ranks of one core work in turns"
    killed_s = time.monotonic()
    os.kill(job_run.pid(device), signal.SIGKILL)
    ended = job_run.wait(Ended, timeout_s=15)
    assert time.monotonic() - killed_s < 5
    assert (ended.outcome, ended.dead) == (Outcome.LOST, (Device(device[0], int(device[1:])),))
    assert ended.snapshot_step >= saved.step
    assert ended.steps_lost == ended.step - ended.snapshot_step  # none, if it died between a snapshot and a step's end
    assert all(map(_gone, pids))
    # It goes on from the snapshot on what is left, in another layout, and to the same bits.
    rest = " ".join(name for name in FOUR[1].split() if name != device)
    job_run.start(plan("tp=1,pp=1,dp=3", rest, job), 2, ended.snapshot).result(60)
    assert time.monotonic() - killed_s < 15
    assert job_run.wait(Started, generation=2).resumed_step == ended.snapshot_step
    job_run.wait_steps(2)
    end = job_run.preempt().result(60)
    assert_state_is_exact(Path(end.snapshot), job, end.step)


@pytest.mark.parametrize(
    "phase", [pytest.param(Phase.PREPARE, marks=FAULT), pytest.param(Phase.CUT, marks=FAULT), Phase.MOVE]
)
def test_a_joiner_dies_and_the_old_generation_goes_on(run: Callable[..., Watched], phase: Phase) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    _kill_in(job_run, phase, "b2")
    began_s = time.monotonic()
    record = job_run.redeploy(plan(*THREE, job), 2, USER).result(60)
    assert time.monotonic() - began_s < 10
    assert record.phase == Phase.ABORTED
    assert "b/2" in record.error
    assert "signal 9" in record.error, "the first cause is reported, not what followed from it"
    assert job_run.wait(Released).devices == (Device("b", 2),)
    job_run.wait_steps(2)
    assert job_run.generation == 1
    job_run.hook = lambda event: None
    assert job_run.redeploy(plan(*THREE, job), 3, USER).result(60).error is None, "the next move succeeds"
    job_run.wait_steps(2)
    ended = job_run.preempt().result(60)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)
    steps = [event.step for event in job_run.events if isinstance(event, StepDone)]
    assert steps == list(range(1, ended.step + 1))


@pytest.mark.parametrize(
    ("phase", "device"),
    [
        pytest.param(Phase.PREPARE, "b1", marks=FAULT),
        pytest.param(Phase.CUT, "a0", marks=FAULT),
        (Phase.MOVE, "b0"),
        pytest.param(Phase.COMMIT, "b2", marks=FAULT),
    ],
)
def test_a_rank_that_is_needed_dies_in_a_move(run: Callable[..., Watched], phase: Phase, device: str) -> None:
    job = spec(snapshot_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    job_run.wait(Snapshotted)
    _kill_in(job_run, phase, device)
    began_s = time.monotonic()
    future = job_run.redeploy(plan(*THREE, job), 2, USER)
    ended = job_run.wait(Ended, timeout_s=20)
    assert time.monotonic() - began_s < 10
    assert ended.outcome == Outcome.LOST
    assert ended.dead == (Device(device[0], int(device[1:])),)
    assert ended.snapshot is not None
    if phase != Phase.COMMIT:
        assert isinstance(future.exception(10), DiedError)
    freed = {device for event in job_run.events if isinstance(event, Released) for device in event.devices}
    assert freed == {Device("a", 0), Device("a", 1), Device("b", 0), Device("b", 1), Device("b", 2)}


def test_who_has_left_is_told_though_the_job_ends_before_the_others_have(run: Callable[..., Watched]) -> None:
    """A device that nobody says is free is nobody's any more."""
    job = spec(snapshot_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    job_run.wait(Snapshotted)
    leaver = job_run.pid("a1")

    def hook(event: JobEvent) -> None:
        if isinstance(event, Moving) and event.record.phase == Phase.COMMIT:
            for pid in (leaver, job_run.pid("b2")):
                os.kill(pid, signal.SIGKILL)
                deadline = time.monotonic() + 10
                while not _gone(pid) and time.monotonic() < deadline:
                    time.sleep(0.01)

    job_run.hook = hook
    job_run.redeploy(plan(*THREE, job), 2, USER)
    assert job_run.wait(Ended, timeout_s=20).dead == (Device("b", 2),)
    freed = {device for event in job_run.events if isinstance(event, Released) for device in event.devices}
    assert freed == {Device("a", 0), Device("a", 1), Device("b", 0), Device("b", 1), Device("b", 2)}


def test_a_leaver_may_die_once_all_is_verified(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    leaver = job_run.pid("b1")

    def commit() -> bool:
        os.kill(leaver, signal.SIGKILL)
        time.sleep(0.2)
        return True

    assert job_run.redeploy(plan(*THREE, job), 2, USER, commit).result(60).error is None
    job_run.wait_steps(2)
    ended = job_run.preempt().result(60)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)


def test_a_refused_commit_returns_to_the_old_generation(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    record = job_run.redeploy(plan(*THREE, job), 2, USER, lambda: False).result(60)
    assert record.phase == Phase.ABORTED
    job_run.wait(StepDone, generation=1, step=record.cut_step + 1)
    ended = job_run.preempt().result(60)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)


def test_a_program_that_cannot_be_built_leaves_the_job_as_it_was(run: Callable[..., Watched], tmp_path: Path) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    (tmp_path / "refuse-3").touch()
    record = job_run.redeploy(plan(*THREE, job), 2, USER).result(60)
    assert record.phase == Phase.ABORTED
    assert "refused to build" in record.error
    job_run.wait_steps(2)
    (tmp_path / "refuse-3").unlink()
    assert job_run.redeploy(plan(*THREE, job), 3, USER).result(60).error is None


@pytest.mark.parametrize("device", ["a0", pytest.param("b1", marks=FAULT)])
def test_a_stopped_rank_is_noticed(run: Callable[..., Watched], device: str) -> None:
    job = spec(snapshot_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    job_run.wait(Snapshotted)
    pid = job_run.pid(device)
    stopped_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    ended = job_run.wait(Ended, timeout_s=25)
    assert time.monotonic() - stopped_s < 20
    assert (ended.outcome, ended.dead) == (Outcome.LOST, (Device(device[0], int(device[1:])),))
    assert _gone(pid)


@FAULT
def test_a_stopped_joiner_does_not_stop_the_job(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    _kill_in(job_run, Phase.PREPARE, "b2", signal.SIGSTOP)
    record = job_run.redeploy(plan(*THREE, job), 2, USER).result(60)
    assert record.phase == Phase.ABORTED
    assert "did not answer" in record.error
    job_run.wait_steps(2)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=FAULT)])
def test_training_goes_on_without_its_store_and_the_next_move_gets_another(
    run: Callable[..., Watched], number: int
) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    store = next(m for m in job_run.gang.members.values() if m.device is None)
    os.kill(store.pid, number)
    deadline = time.monotonic() + 25
    while store.alive and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not store.alive
    job_run.wait_steps(2)
    assert job_run.redeploy(plan(*THREE, job), 2, USER).result(60).error is None


def test_a_move_whose_store_dies_is_called_off_and_the_job_trains_on(run: Callable[..., Watched]) -> None:
    job = spec()
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)

    def kill_the_store(event: object) -> None:
        if isinstance(event, Moving) and event.record.phase == Phase.PREPARE:
            store = next(m for m in job_run.gang.members.values() if m.device is None)
            os.kill(store.pid, signal.SIGKILL)

    job_run.hook = kill_the_store
    record = job_run.redeploy(plan(*THREE, job), 2, USER).result(60)
    assert record.phase == Phase.ABORTED
    assert "store" in record.error
    job_run.wait_steps(2)
    assert job_run.generation == 1
    job_run.hook = lambda event: None
    assert job_run.redeploy(plan(*THREE, job), 3, USER).result(60).error is None, "with a store of its own"
    job_run.wait_steps(2)
    ended = job_run.preempt().result(60)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)


def test_the_last_step_may_come_before_the_cut(run: Callable[..., Watched]) -> None:
    job = spec(steps=4)
    job_run = run(job)
    job_run.start(plan(*FOUR, job), 1).result(60)
    record = job_run.redeploy(plan(*THREE, job), 2, USER).result(60)
    assert record.phase == Phase.ABORTED
    assert job_run.wait(Ended).outcome == Outcome.FINISHED
