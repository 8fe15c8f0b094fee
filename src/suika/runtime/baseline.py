"""The rival of a move: save a checkpoint, stop, start again in the new layout, load. Measured, never estimated.

It is given every advantage: DCP files written once each, fork-warmed processes, groups as the move has them, and
memory or disk, whichever is quicker. `cold` starts a fresh Python for every rank instead, as most systems do.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from suika.core.cluster import Cluster
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.runtime.coordinator import PROGRAM, JobRun
from suika.runtime.events import Ended, JobEvent, StepDone
from suika.runtime.gang import Limits
from suika.runtime.messages import Message, Processes
from suika.runtime.rooms import Rooms
from suika.runtime.timing import STEPS_FOR_A_MEDIAN, StepTimes, pause_s

Medium = Literal["memory", "disk"]
WARM_STEPS = 2
_LONGEST_S = 300.0


@dataclass(frozen=True)
class Restart:
    """One restart. `pause_s` as a move's: last old step to first new one, less a median step of the new layout."""

    medium: Medium
    pause_s: float
    save_s: float  # from the notice to the end of all old processes, the step under way included
    load_s: float  # from the first fork to the end of the first step


class Machine(Processes, Protocol):
    """A backend that this process starts and ends."""

    def start(self) -> None: ...

    def close(self) -> None: ...


def measure_restart(
    spec: JobSpec,
    old: Plan,
    new: Plan,
    processes: Processes,
    cluster: Cluster,
    data_path: str,
    medium: Medium = "memory",
    disk: Path | None = None,
    restart_on: Processes | None = None,
    program: str = PROGRAM,
) -> Restart:
    """Train in `old`, then restart in `new` from a checkpoint. Nothing is left in either medium.

    `disk`: a folder on the disk to use. `restart_on`: where the new processes come from, by default `processes`.
    """
    spec = spec.model_copy(update={"steps": 10**9, "snapshot_every_steps": 0})
    parent = "/dev/shm" if medium == "memory" else disk
    with tempfile.TemporaryDirectory(prefix="suika-restart-", dir=parent) as folder:
        place = (cluster, Path(folder), data_path, program)
        with _Timed(spec, processes, *place) as before:
            before.run.start(old, 1).result(_LONGEST_S)
            before.wait(WARM_STEPS + 1)
            began_s = time.monotonic()
            ended = before.run.preempt().result(_LONGEST_S)
            saved_s = time.monotonic()
        assert ended.snapshot is not None, ended.error
        with _Timed(spec, restart_on or processes, *place) as after:
            after.run.start(new, 2, ended.snapshot).result(_LONGEST_S)
            loaded_s = time.monotonic()
            after.wait(STEPS_FOR_A_MEDIAN + 1)
    pause = pause_s(before.times, after.times)
    assert pause is not None
    return Restart(medium, pause, saved_s - began_s, loaded_s - saved_s)


class _Timed:
    """A job and the times of its steps."""

    def __init__(
        self, spec: JobSpec, processes: Processes, cluster: Cluster, folder: Path, data_path: str, program: str
    ) -> None:
        self.times = StepTimes()
        self._news = threading.Condition()
        self._ended = False
        job_id = f"restart-{folder.name}"
        patient = Limits(launch_s=_LONGEST_S, silent_s=_LONGEST_S)  # cold processes say nothing while they import
        self.run = JobRun(job_id, spec, processes, cluster, folder, data_path, self._hear, program, patient)

    def __enter__(self) -> _Timed:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.run.close()

    def _hear(self, event: JobEvent) -> None:
        with self._news:
            if isinstance(event, StepDone):
                self.times.ended(event.step, event.at_s)
            self._ended |= isinstance(event, Ended)
            self._news.notify_all()

    def wait(self, num_steps: int) -> None:
        with self._news:
            there = self._news.wait_for(lambda: self._ended or len(self.times.ends_s) >= num_steps, _LONGEST_S)
        if not there or self._ended:
            raise RuntimeError(f"no {num_steps} steps: the job {'ended' if self._ended else 'is too slow'}")


class ColdProcesses:
    """A fresh interpreter, with all its imports, for every process: `make()` gives a machine for one."""

    def __init__(self, make: Callable[[], Machine]) -> None:
        self._make = make
        self.rooms = Rooms(dict)  # these jobs keep no copies
        self._machines: dict[str, Machine] = {}
        self._starting = ThreadPoolExecutor(thread_name_prefix="cold-start", max_workers=64)

    def spawn(
        self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Callable[[Message], None]
    ) -> None:
        machine = self._machines[process] = self._make()

        def bring_up() -> None:
            machine.start()
            machine.spawn(process, node, entry, launch, listener)

        self._starting.submit(bring_up)

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        self._machines[process].send(process, message)

    def kill(self, process: str) -> None:
        self._machines[process].kill(process)

    def ping(self, processes: Collection[str]) -> None:
        for process in processes:
            self._machines[process].ping((process,))

    def unanswered_s(self, process: str) -> float:
        return self._machines[process].unanswered_s(process)

    def close(self) -> None:
        self._starting.shutdown()
        for machine in self._machines.values():
            machine.close()
