"""A live cluster in tests' hands, and the command line beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="live jobs train: the extra `train` is needed")

from suika.control.service import Service
from suika.core.job import ENDED, JobState
from suika.demo.scene import LiveScene, Recorder

MODEL = {"family": "llama", "layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 257}


class Live:
    """A running cluster, and what tests do with it."""

    def __init__(self, service: Service, recorder: Recorder, text: Path) -> None:
        self.service, self.recorder, self.text = service, recorder, text
        self.api, self.state = service.api, service.controller.state
        self.scene = LiveScene(self.state)

    def file(self, name: str, **changes: Any) -> dict[str, Any]:
        base = {"name": name, "model": MODEL, "data": str(self.text), "global_batch": 4, "sequence_length": 32}
        base |= {"steps": 2000, "precision": "fp64", "devices": {"min": 1, "max": 2}, "snapshot_every_steps": 0}
        return base | changes

    def submit(self, name: str, **changes: Any) -> str:
        return self.api.submit(self.file(name, **changes))["id"]

    def wait(self, what: str, condition: Callable[[], bool], timeout_s: float = 60.0) -> float:
        """Seconds until `condition` holds; fails the test after `timeout_s`."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert waited < timeout_s, f"not within {timeout_s:.0f} s: {what}; jobs: {self.api.jobs(all=True)}"
            time.sleep(0.02)
        return time.monotonic() - began

    def state_of(self, name: str) -> JobState | None:
        job = self.scene.job(name)
        return job.state if job else None

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.api.events(job=name) if event["kind"] == kind]

    def pids(self, name: str) -> dict[str, int]:
        """Device -> pid of the job's ranks."""
        job = self.scene.job(name)
        assert job is not None
        run = self.state.seen(job.id).run
        assert run is not None
        return {str(device): member.pid for device, member in run.ranks.items() if member.pid is not None}

    def cli(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return suika(*arguments, home=self.service.folder, timeout_s=timeout_s)

    def clear(self) -> None:
        """End what a test left behind."""
        for job in self.state.active():
            self.api.cancel(job.id)
        self.wait(
            "all devices free",
            lambda: not self.state.releasing and not any(w.held for w in tuple(self.state.watches.values())),
        )
        self.service.controller.call(self.state.down.clear)
        for node in self.state.store.draining():
            self.api.drain(node, undo=True)
        assert all(job.state in ENDED for job in self.state.store.jobs())
        faults = [event for event in self.api.events(limit=100_000) if event["kind"] == "controller-fault"]
        assert not faults, faults


def suika(*arguments: str, home: Path, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SUIKA_HOME": str(home)}
    command = [sys.executable, "-m", "suika.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s, check=False)


def document(run: subprocess.CompletedProcess[str]) -> Any:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)
