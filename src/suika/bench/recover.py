"""`suika bench recover`: how long a job takes to come up, to notice a death, to train again, and to call a move off.

The built-in trainer runs on four emulated CPU devices. Each round kills (SIGKILL) or stops (SIGSTOP) a rank, waits for
`Ended(LOST)`, starts again on the other three from the snapshot, and kills the joiner of a move. A larger job (0.28 GB
of state) on two nodes loses one of them, with copies in memory and without. Times are seconds on this process's clock,
from the signal on; medians over the rounds, with the extremes beside them in `range`.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from suika.backends.local import LocalBackend
from suika.core.cluster import Cluster, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.job import parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.core.redeployment import Phase
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Copied, Ended, JobEvent, Moving, Snapshotted, StepDone
from suika.train.data import prepare

CLUSTER = Cluster((Node("a", 4, "cpu"), Node("b", 4, "cpu")))
MODEL = {"family": "llama", "layers": 4, "hidden": 128, "ffn": 352, "heads": 4, "vocab": 257}
JOB = {"name": "recover", "data": "text", "model": MODEL, "global_batch": 12, "sequence_length": 64, "steps": 10**9}
LARGE = {"family": "llama", "layers": 6, "hidden": 512, "ffn": 1408, "heads": 8, "vocab": 5000}
TWO_NODES, ONE_NODE = ("tp=2,pp=2,dp=1", "0145"), ("tp=1,pp=2,dp=1", "01")
FOUR, THREE, MOVED = ("tp=2,pp=1,dp=2", "0123"), ("tp=1,pp=1,dp=3", "012"), ("tp=1,pp=2,dp=1", "03")
REASON = Reason(ReasonCode.USER, "the benchmark wants it")
_WAIT_S = 120.0
SomeEvent = TypeVar("SomeEvent", bound=JobEvent)


class Recorder:
    """A job's events, and waiting for one that has not come yet."""

    def __init__(self) -> None:
        self._events: list[JobEvent] = []
        self._news = threading.Condition()
        self.hook: Callable[[JobEvent], None] = lambda event: None

    def __call__(self, event: JobEvent) -> None:
        self.hook(event)
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def next(self, kind: type[SomeEvent], num: int = 1) -> SomeEvent:
        """The `num`-th event of `kind` from now on. Raises `TimeoutError`."""
        with self._news:
            seen = len(self._events)

            def coming() -> list[SomeEvent]:
                return [event for event in self._events[seen:] if isinstance(event, kind)]

            if not self._news.wait_for(lambda: len(coming()) >= num, _WAIT_S):
                raise TimeoutError(f"no {kind.__name__} within {_WAIT_S:.0f} s")
            return coming()[num - 1]


def run(rounds: int = 3) -> dict[str, Any]:
    """`rounds` of each kind of failure."""
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="suika-bench-") as folder:
        data = Path(folder) / "text.bin"
        prepare(sysconfig.get_paths()["stdlib"], data, pattern="*.py", max_bytes=200_000)
        began_s = time.monotonic()
        with LocalBackend(CLUSTER, Path(folder) / "run", preload=("suika.train.program",)) as backend:
            times["fork_server_s"].append(time.monotonic() - began_s)
            for number in range(rounds):
                for name, kind in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
                    _say(f"round {number + 1} of {rounds}: a rank is {name}")
                    _lose_a_rank(backend, Path(folder) / f"{name}-{number}", str(data), name, kind, times)
                _say(f"round {number + 1} of {rounds}: a joiner dies")
                _lose_a_joiner(backend, Path(folder) / f"joiner-{number}", str(data), times)
                for source in ("memory", "disk"):
                    _say(f"round {number + 1} of {rounds}: a node dies, the state comes from {source}")
                    _lose_a_node(backend, Path(folder) / f"{source}-{number}", str(data), source, times)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {**medians, "range": {name: [min(values), max(values)] for name, values in times.items()}}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _plan(placed: tuple[str, str], **more: Any) -> Plan:
    job = parse_job({**JOB, **more})
    devices = tuple(CLUSTER.devices[int(digit)] for digit in placed[1])
    return Plan.checked(Layout.parse(placed[0]), devices, job.model, job.global_batch, job.sequence_length, CLUSTER)


def _begin(backend: LocalBackend, folder: Path, data: str, every: int, **more: Any) -> tuple[JobRun, Recorder]:
    events = Recorder()
    job = parse_job({**JOB, "snapshot_every_steps": every, **more})
    return JobRun(folder.name, job, backend, CLUSTER, folder, data, events), events


def _lose_a_rank(
    backend: LocalBackend, folder: Path, data: str, name: str, kind: int, times: dict[str, list[float]]
) -> None:
    job, events = _begin(backend, folder, data, every=5)
    try:
        began_s = time.monotonic()
        job.start(_plan(FOUR), 1).result(_WAIT_S)
        times["launch_s"].append(time.monotonic() - began_s)
        times["snapshot_stall_s"].append(events.next(Snapshotted).stall_s)
        victim = job.ranks[CLUSTER.devices[3]].pid
        assert victim is not None
        struck_s = time.monotonic()
        os.kill(victim, kind)
        ended = events.next(Ended)
        noticed_s = time.monotonic()
        job.start(_plan(THREE), 2, ended.snapshot).result(_WAIT_S)
        times[f"{name}_ended_s"].append(noticed_s - struck_s)
        times[f"{name}_training_again_s"].append(time.monotonic() - noticed_s)
        times[f"{name}_steps_lost"].append(ended.steps_lost)
    finally:
        job.close()


def _lose_a_node(backend: LocalBackend, folder: Path, data: str, source: str, times: dict[str, list[float]]) -> None:
    """All processes of the job on the second node, its holder of copies included."""
    in_memory = source == "memory"
    more = {"model": LARGE, "sequence_length": 16, "memory_copy_every_steps": 5 if in_memory else 0}
    job, events = _begin(backend, folder, data, 0 if in_memory else 5, **more)
    try:
        job.start(_plan(TWO_NODES, **more), 1).result(_WAIT_S)
        first = events.next(StepDone)
        kept = events.next(Copied, num=2) if in_memory else events.next(Snapshotted, num=2)
        last = events.next(StepDone)
        times[f"{source}_stall_s"].append(kept.stall_s)
        times[f"{source}_step_s"].append((last.at_s - first.at_s) / (last.step - first.step))
        struck_s = time.monotonic()
        for pid in (*(m.pid for d, m in job.ranks.items() if d.node == "b"), *job.copies.pids("b")):
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        ended = events.next(Ended)
        noticed_s = time.monotonic()
        job.start(_plan(ONE_NODE, **more), 2, ended.snapshot).result(_WAIT_S)
        times[f"node_ended_with_{source}_s"].append(noticed_s - struck_s)
        times[f"node_training_again_from_{source}_s"].append(time.monotonic() - noticed_s)
    finally:
        job.close()


def _lose_a_joiner(backend: LocalBackend, folder: Path, data: str, times: dict[str, list[float]]) -> None:
    """In the move itself, when all have stopped: the old generation goes on at the same step."""
    job, events = _begin(backend, folder, data, every=0)
    try:
        job.start(_plan(THREE), 1).result(_WAIT_S)
        events.next(StepDone, num=3)
        struck_s = 0.0

        def strike(event: JobEvent) -> None:
            nonlocal struck_s
            if isinstance(event, Moving) and event.record.phase == Phase.MOVE:
                joiner = next(m for m in job.gang.members.values() if m.device == CLUSTER.devices[3])
                assert joiner.pid is not None
                struck_s = time.monotonic()
                os.kill(joiner.pid, signal.SIGKILL)

        events.hook = strike
        record = job.redeploy(_plan(MOVED), 2, REASON).result(_WAIT_S)
        assert record.phase == Phase.ABORTED, record
        times["move_called_off_s"].append(time.monotonic() - struck_s)
    finally:
        job.close()
