"""A rank's background writer of snapshots: training stops only for the copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from suika.runtime import snapshot
from suika.runtime.generation import Generation, RankJob
from suika.runtime.snapshot import Captured

Say = Callable[..., None]


class Saver:
    """At most one snapshot is being written. Says `written` or `unwritten`, and on rank 0 `published`."""

    def __init__(self, job: RankJob, say: Say) -> None:
        self._job, self._say = job, say
        self._lock = threading.Lock()  # of the two that follow: the coordinator's word comes on another thread
        self._writer: threading.Thread | None = None
        self._captured: Captured | None = None

    def save(self, live: Generation, step: int) -> None:
        """Copy the state after `step` and write it in the background; waits for an unfinished earlier one first."""
        began_s = time.monotonic()
        self.join()
        program = live.program
        captured = snapshot.capture(self._job.shape, live.plan, live.rank, step, program.records(), program.buffers())
        stall_s = time.monotonic() - began_s
        with self._lock:
            self._captured = captured
            self._start(self._write, live.number, captured, stall_s)

    def publish(self, generation: int, step: int) -> None:
        """All ranks have written: make it a snapshot (rank 0)."""
        with self._lock:
            captured = self._captured
            if captured is not None and captured.step == step:
                self._start(self._publish, generation, captured)

    @property
    def is_writing(self) -> bool:
        return self._writer is not None and self._writer.is_alive()

    def join(self) -> None:
        with self._lock:
            writer = self._writer  # one that has been started
        if writer is not None:
            writer.join()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._writer = threading.Thread(target=target, args=arguments, name="saver", daemon=True)
        self._writer.start()

    def _write(self, generation: int, captured: Captured, stall_s: float) -> None:
        folder = snapshot.folder_of(self._job.snapshots, captured.step, generation)
        try:
            snapshot.write(folder, captured)
        except Exception as error:  # a full disk must not end training
            self._say("unwritten", generation=generation, step=captured.step, error=f"{type(error).__name__}: {error}")
        else:
            self._say("written", generation=generation, step=captured.step, stall_s=stall_s)

    def _publish(self, generation: int, captured: Captured) -> None:
        folder = snapshot.folder_of(self._job.snapshots, captured.step, generation)
        try:
            snapshot.publish(folder, captured, generation, self._job.job_id)
        except Exception as error:
            self._say("unwritten", generation=generation, step=captured.step, error=f"{type(error).__name__}: {error}")
        else:
            with self._lock:
                if self._captured is captured:  # the next one may have been taken meanwhile
                    self._captured = None
            self._say("published", generation=generation, step=captured.step, path=str(folder))
