"""A final checkpoint is whole or not there, and its job has not ended before."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from world import World

from suika.control import final
from suika.control.adopt import Adoption
from suika.control.controller import Controller
from suika.control.views import take_snapshot
from suika.core.cluster import Device
from suika.core.errors import SpecError
from suika.core.job import JobState
from suika.runtime.events import Ended, Outcome


def finish(world: World, run, snapshot: Path) -> None:  # type: ignore[no-untyped-def]
    run.step = 100
    run.on_event(Ended(run.job_id, run.generation, Outcome.FINISHED, 100, str(snapshot), 100))
    world.turn()


def snapshot_in(folder: Path) -> Path:
    made = folder / "snapshot"
    (made / "inner").mkdir(parents=True)
    (made / "inner" / "a.distcp").write_bytes(b"weights")
    (made / "manifest.json").write_text("{}")
    return made


def until(world: World, state: JobState) -> None:
    deadline = time.monotonic() + 10
    while world.job("train").state is not state:
        assert time.monotonic() < deadline, world.job("train")
        world.turn()


def test_it_is_there_before_the_job_has_ended(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def slow(job, path):  # type: ignore[no-untyped-def]
        seen.append(world.job("train").state)
        final_deliver(job, path)

    final_deliver = final.deliver
    monkeypatch.setattr(final, "deliver", slow)
    run = world.start("train", "n0/0", final_checkpoint=str(tmp_path / "done"))
    finish(world, run, snapshot_in(tmp_path))
    until(world, JobState.FINISHED)
    assert seen == [JobState.RUNNING]
    assert (tmp_path / "done" / "inner" / "a.distcp").read_bytes() == b"weights"
    assert world.kinds("train")[-2:] == ["final-checkpoint", "job-finished"]
    assert run.closed or world.controller.state.watch(world.job("train").id).run is None
    assert not list(tmp_path.glob(".done*"))


def test_its_devices_are_free_while_it_is_delivered(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = threading.Event()
    monkeypatch.setattr(final, "deliver", lambda job, path: copied.wait(10))
    run = world.start("train", "n0/0", final_checkpoint=str(tmp_path / "done"))
    finish(world, run, snapshot_in(tmp_path))
    seen = world.policy.seen[-1]
    assert world.job("train").state is JobState.RUNNING
    assert Device("n0", 0) in seen.free
    assert seen.job_of[world.job("train").id].locked_at(world.now), "nor is it begun again"
    run.saved(100)
    world.start("next", "n0/0")
    again = Controller(world.cluster, world.store, world.policy, world.controller.pricing, world, lambda: world.now)
    roster: Any = SimpleNamespace(found={}, devices_away=lambda devices: list(devices))
    hub: Any = SimpleNamespace(lease_s=60.0)
    launcher: Any = SimpleNamespace(run_again=lambda job, hear: world.run(job, world.data, hear))
    Adoption(again, roster, hub, launcher).begin()
    held = {view.id: list(map(str, view.devices)) for view in take_snapshot(again.state, again.pricing).jobs}
    assert held == {world.job("train").id: [], world.job("next").id: ["n0/0"]}, "nor held twice after a crash"
    copied.set()
    until(world, JobState.FINISHED)


def test_what_goes_wrong_is_no_success(world: World, tmp_path: Path) -> None:
    run = world.start("train", "n0/0", final_checkpoint=str(tmp_path / "done"))
    snapshot = snapshot_in(tmp_path)
    (tmp_path / "done").mkdir()  # taken meanwhile
    finish(world, run, snapshot)
    until(world, JobState.FAILED)
    sentence = world.job("train").reason.sentence
    assert "exists already" in sentence
    assert str(snapshot) in sentence


def test_after_a_crash_it_is_delivered_once(world: World, tmp_path: Path) -> None:
    world.start("train", "n0/0", final_checkpoint=str(tmp_path / "done"))
    snapshot, job = snapshot_in(tmp_path), world.job("train")
    half = tmp_path / f".done.{job.id}.tmp"
    half.mkdir()
    (half / "half").write_text("of an earlier attempt")
    for _ in range(2):  # the second time it is known to be done
        final.deliver(job, str(snapshot))
    assert sorted(path.name for path in (tmp_path / "done").iterdir()) == ["inner", "manifest.json", f"suika-{job.id}"]


@pytest.mark.parametrize(
    ("path", "text"), [("/no/such/folder/x", "parent"), ("relative", "absolute"), ("/a/../b", "..")]
)
def test_places_that_are_refused_at_submit(world: World, path: str, text: str) -> None:
    with pytest.raises(SpecError, match=text):
        world.submit("train", final_checkpoint=path)
    assert world.store.jobs() == ()
