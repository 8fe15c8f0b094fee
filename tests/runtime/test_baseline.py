"""Checkpoint and restart, measured: warm from memory and disk, cold with an interpreter per rank; nothing is left."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from suika.backends.local import LocalBackend
from suika.runtime.baseline import ColdProcesses, measure_restart

from .conftest import CLUSTER, plan, spec


@pytest.mark.fault
def test_a_restart_is_measured_and_leaves_nothing(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = spec()
    old, new = plan("tp=2,pp=1,dp=1", "a0 a1", job), plan("tp=1,pp=1,dp=2", "b0 b1", job)
    folders: list[Path] = []

    class Noted(tempfile.TemporaryDirectory):
        def __enter__(self) -> str:
            folders.append(Path(self.name))
            return super().__enter__()

    monkeypatch.setattr(tempfile, "TemporaryDirectory", Noted)
    setting = {"cluster": CLUSTER, "data_path": str(tmp_path), "program": "tiny_program:build"}
    here = {"PYTHONPATH": str(Path(__file__).parent)}
    cold_folders = iter(range(100))
    cold = ColdProcesses(lambda: LocalBackend(CLUSTER, tmp_path / str(next(cold_folders)), environment=here))
    try:
        memory = measure_restart(job, old, new, backend, medium="memory", **setting)
        disk = measure_restart(job, old, new, backend, medium="disk", disk=tmp_path, **setting)
        from_cold = measure_restart(job, old, new, backend, medium="memory", restart_on=cold, **setting)
    finally:
        cold.close()
    for restart in (memory, disk, from_cold):
        assert 0 < restart.save_s < restart.pause_s
        assert 0 < restart.load_s < restart.pause_s + 0.1
    assert from_cold.pause_s > memory.pause_s
    assert [folder.parent for folder in folders] == [Path("/dev/shm"), tmp_path, Path("/dev/shm")]
    assert not any(folder.exists() for folder in folders)
