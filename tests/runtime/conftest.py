"""One fork server for all tests of the room, and jobs on it whose events the test can wait for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from suika.backends.local import LocalBackend
from suika.core.cluster import Cluster, Device, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.runtime.coordinator import JobRun
from suika.runtime.events import JobEvent
from suika.runtime.gang import Limits

CLUSTER = Cluster((Node("a", 4, "cpu"), Node("b", 4, "cpu")))
MODEL = {"family": "llama", "layers": 3, "hidden": 16, "ffn": 24, "heads": 4, "kv_heads": 2, "vocab": 37}
USER = Reason(ReasonCode.USER, "the test wants it")
torch.set_num_threads(1)


def spec(name: str = "tiny", steps: int = 100_000, snapshot_every_steps: int = 0, **more: Any) -> JobSpec:
    base = {"name": name, "model": MODEL, "data": "none", "global_batch": 12, "sequence_length": 8, "steps": steps}
    return parse_job({**base, "precision": "fp64", "snapshot_every_steps": snapshot_every_steps, **more})


def plan(layout: str, devices: str, job: JobSpec) -> Plan:
    """`plan("tp=2,pp=1,dp=1", "a0 b1", job)`."""
    placed = tuple(Device(text[0], int(text[1:])) for text in devices.split())
    return Plan.checked(Layout.parse(layout), placed, job.model, job.global_batch, job.sequence_length, CLUSTER)


class Watched(JobRun):
    """A job that keeps its events, and lets a test act on the job's own thread when one comes."""

    def __init__(self, job: JobSpec, backend: LocalBackend, folder: Path, **more: Any) -> None:
        self.events: list[JobEvent] = []
        self.hook: Callable[[JobEvent], None] = lambda event: None
        self._news = threading.Condition()
        limits = Limits(silent_s=2.0, answer_s=5.0)
        more = {"program": "tiny_program:build", "limits": limits, "data_path": str(folder), **more}
        super().__init__(f"{job.name}-{os.urandom(3).hex()}", job, backend, CLUSTER, folder, on_event=self.note, **more)

    def note(self, event: JobEvent) -> None:
        self.hook(event)
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait(self, kind: type, timeout_s: float = 60.0, **fields: Any) -> Any:
        """The first event of `kind` whose fields are as given."""

        def found() -> JobEvent | None:
            matching = (e for e in self.events if isinstance(e, kind))
            return next((e for e in matching if all(getattr(e, k) == v for k, v in fields.items())), None)

        with self._news:
            assert self._news.wait_for(lambda: found() is not None, timeout_s), f"no {kind.__name__} {fields}"
            return found()

    def wait_steps(self, num: int, timeout_s: float = 30.0) -> None:
        """Until `num` more steps are done."""
        target, deadline = self.step + num, time.monotonic() + timeout_s
        while self.step < target:
            assert time.monotonic() < deadline, f"step {self.step} of {target}"
            time.sleep(0.005)

    def pid(self, device: str) -> int:
        member = self.ranks[Device(device[0], int(device[1:]))]
        assert member.pid is not None
        return member.pid


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    here = str(Path(__file__).parent)
    with LocalBackend(CLUSTER, tmp_path_factory.mktemp("run"), environment={"PYTHONPATH": here}) as running:
        yield running


@pytest.fixture
def run(backend: LocalBackend, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Makes jobs, and ends what a test left running."""
    made: list[Watched] = []

    def make(job: JobSpec, **more: Any) -> Watched:
        made.append(Watched(job, backend, tmp_path, **more))
        return made[-1]

    yield make
    for job in made:
        job.close()
