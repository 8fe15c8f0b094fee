"""What the controller must not forget: jobs (compare-and-set), append-only events, drained nodes.

The interface is small on purpose: everything else the controller knows can be observed again.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

from suika.core.job import ENDED, Job


@dataclass(frozen=True)
class Event:
    """Something that happened; never changed or removed. `seq` grows by one."""

    seq: int
    at_s: float
    kind: str
    job_id: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"seq": self.seq, "at_s": self.at_s, "kind": self.kind, "job_id": self.job_id, "data": dict(self.data)}


@dataclass(frozen=True)
class News:
    """An event that is still to be numbered: it is stored together with the record that it tells of, or not at all."""

    at_s: float
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class StaleWriteError(RuntimeError):
    """Somebody else changed the record first: the writer's view is out of date and its write did not happen."""


class Store(Protocol):
    """Safe to call from any thread."""

    def add(self, job: Job, news: News | None = None) -> None:
        """A new job; its id must be new."""
        ...

    def put(self, job: Job, news: News | None = None) -> None:
        """Replace the record that `job` was made from (its version + 1); raises `StaleWriteError` otherwise.

        Leaves `steps_done` alone: a change of state never takes back a step that was done meanwhile."""
        ...

    def progress(self, job_id: str, generation: int, steps_done: int) -> bool:
        """Record the progress of a generation (less than before after a recovery). False, and no change, unless that
        generation is the job's present one: an old incarnation writes nothing. Leaves the version alone."""
        ...

    def job(self, job_id: str) -> Job: ...

    def jobs(self) -> tuple[Job, ...]:
        """All jobs, by (submitted_s, id)."""
        ...

    def saved(self, job_id: str, generation: int, step: int, path: str) -> bool:
        """Record a complete snapshot: from now on a replacement starts from it. False, and no change, unless
        `generation` is the job's present one and the job has not ended."""
        ...

    def snapshot(self, job_id: str) -> tuple[str, int] | None:
        """(path, steps done in it) of the job's newest recorded snapshot."""
        ...

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event: ...

    def events(self, after: int = 0, job_id: str | None = None, limit: int | None = None) -> tuple[Event, ...]:
        """Events with `seq` > `after`, oldest first, at most `limit`."""
        ...

    def draining(self) -> frozenset[str]: ...

    def set_draining(self, nodes: frozenset[str]) -> None: ...


class MemoryStore:
    """A `Store` that lives as long as its process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._snapshots: dict[str, tuple[str, int]] = {}
        self._events: list[Event] = []
        self._draining: frozenset[str] = frozenset()

    def add(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            assert job.id not in self._jobs, f"job {job.id} exists"
            self._jobs[job.id] = job
            self._tell(news, job.id)

    def put(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            present = self._jobs[job.id]
            if present.version + 1 != job.version:
                raise StaleWriteError(f"{job.id}: version {present.version} was not the one read ({job.version - 1})")
            self._jobs[job.id] = replace(job, steps_done=present.steps_done)
            self._tell(news, job.id)

    def _tell(self, news: News | None, job_id: str | None) -> None:
        if news is not None:
            self._events.append(Event(len(self._events) + 1, news.at_s, news.kind, job_id, news.data))

    def progress(self, job_id: str, generation: int, steps_done: int) -> bool:
        with self._lock:
            present = self._jobs[job_id]
            if present.generation != generation or present.state in ENDED:
                return False
            self._jobs[job_id] = replace(present, steps_done=steps_done)
            return True

    def job(self, job_id: str) -> Job:
        with self._lock:
            return self._jobs[job_id]

    def jobs(self) -> tuple[Job, ...]:
        with self._lock:
            return tuple(sorted(self._jobs.values(), key=lambda job: (job.submitted_s, job.id)))

    def saved(self, job_id: str, generation: int, step: int, path: str) -> bool:
        with self._lock:
            present = self._jobs[job_id]
            if present.generation != generation or present.state in ENDED:
                return False
            self._snapshots[job_id] = (path, step)
            return True

    def snapshot(self, job_id: str) -> tuple[str, int] | None:
        with self._lock:
            return self._snapshots.get(job_id)

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event:
        with self._lock:
            event = Event(len(self._events) + 1, at_s, kind, job_id, data)
            self._events.append(event)
            return event

    def events(self, after: int = 0, job_id: str | None = None, limit: int | None = None) -> tuple[Event, ...]:
        with self._lock:
            found = (e for e in self._events[after:] if job_id is None or e.job_id == job_id)
            return tuple(islice(found, limit))

    def draining(self) -> frozenset[str]:
        with self._lock:
            return self._draining

    def set_draining(self, nodes: frozenset[str]) -> None:
        with self._lock:
            self._draining = nodes
