"""A store that goes with its process: for the demo and tests, and the image from which a database answers reads."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from suika.control.store import CONCERN_ALL, EVERY, Event, Head, News, StaleWriteError, Which
from suika.core.job import ENDED, Job


class MemoryStore:
    """A `Store` that lives as long as its process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._jobs: dict[str, Job] = {}
        self._unread: dict[str, Callable[[], Job]] = {}  # jobs that nobody has asked for yet
        self._heads: dict[str, Head] = {}
        self._order: list[tuple[float, str]] = []  # (submitted_s, id) of all
        self._active: list[tuple[float, str]] = []  # of those that have not ended
        self._names: dict[str, list[str]] = {}
        self._snapshots: dict[str, tuple[str, int]] = {}
        self._calibrations: dict[tuple[str, str], Mapping[str, Any]] = {}
        self._events: list[Event] = []
        self._draining: frozenset[str] = frozenset()

    def add(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            assert job.id not in self._heads, f"job {job.id} exists"
            self._enter(Head.of(job))
            self._jobs[job.id] = job
            self._tell(news, job.id)

    def add_unread(self, head: Head, read: Callable[[], Job]) -> None:
        """A job of an earlier life: `read` is called when it is first asked for."""
        with self._lock:
            self._enter(head)
            self._unread[head.id] = read

    def _enter(self, head: Head) -> None:
        place = (head.submitted_s, head.id)
        self._heads[head.id] = head
        insort(self._order, place)
        if head.state not in ENDED:
            insort(self._active, place)
        self._names.setdefault(head.name, []).append(head.id)

    def put(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            present = self.job(job.id)
            if present.version + 1 != job.version:
                raise StaleWriteError(f"{job.id}: version {present.version} was not the one read ({job.version - 1})")
            self.replace(replace(job, steps_done=present.steps_done))
            self._tell(news, job.id)

    def replace(self, job: Job) -> None:
        """`job` as it is, whatever was there."""
        with self._lock:
            before, after = self._heads[job.id], Head.of(job)
            self._jobs[job.id], self._heads[job.id] = job, after
            if (before.state in ENDED) != (after.state in ENDED):
                place = (after.submitted_s, after.id)
                if after.state in ENDED:
                    del self._active[bisect_left(self._active, place)]
                else:  # a change that was taken back
                    insort(self._active, place)

    def remove(self, job_id: str) -> None:
        """As if it had never been added."""
        with self._lock:
            head = self._heads.pop(job_id)
            self._jobs.pop(job_id, None)
            place = (head.submitted_s, head.id)
            for places in (self._order, self._active):
                if place in places:
                    places.remove(place)
            self._names[head.name].remove(job_id)

    def _tell(self, news: News | None, job_id: str | None) -> None:
        if news is not None:
            self._events.append(Event(len(self._events) + 1, news.at_s, news.kind, job_id, news.data))

    def progress(self, job_id: str, generation: int, steps_done: int) -> bool:
        with self._lock:
            present = self.job(job_id)
            if present.generation != generation or present.state in ENDED:
                return False
            self._jobs[job_id] = replace(present, steps_done=steps_done)
            return True

    def job(self, job_id: str) -> Job:
        with self._lock:
            read = self._unread.pop(job_id, None)
            if read is not None:
                self._jobs[job_id] = read()
            return self._jobs[job_id]

    def jobs(self) -> tuple[Job, ...]:
        with self._lock:
            return tuple(self.job(job_id) for _, job_id in self._order)

    def active(self) -> tuple[Job, ...]:
        with self._lock:
            return tuple(self.job(job_id) for _, job_id in self._active)

    def heads(self) -> tuple[Head, ...]:
        with self._lock:
            return tuple(self._heads[job_id] for _, job_id in self._order)

    def named(self, name: str) -> tuple[Head, ...]:
        with self._lock:
            found = [*self._names.get(name, ()), *((name,) if name in self._heads else ())]
            return tuple(sorted({self._heads[job_id] for job_id in found}))

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._lock:
            yield

    def saved(self, job_id: str, generation: int, step: int, path: str) -> bool:
        with self._lock:
            present = self.job(job_id)
            if present.generation != generation or present.state in ENDED:
                return False
            self._snapshots[job_id] = (path, step)
            return True

    def snapshot(self, job_id: str) -> tuple[str, int] | None:
        with self._lock:
            return self._snapshots.get(job_id)

    def calibrated(self, job_id: str, device_type: str, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._calibrations.pop((job_id, device_type), None)
            self._calibrations[job_id, device_type] = dict(record)

    def calibrations(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        with self._lock:
            return dict(self._calibrations)

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event:
        with self._lock:
            event = Event(len(self._events) + 1, at_s, kind, job_id, data)
            self._events.append(event)
            return event

    def events(
        self, after: int = 0, job_id: str | None = None, limit: int | None = None, which: Which = EVERY
    ) -> tuple[Event, ...]:
        with self._lock:
            known = self._events[after : None if which.before is None else max(which.before - 1, 0)]
            found = (e for e in (reversed(known) if which.last else known) if self._is_wanted(e, job_id, which))
            page = tuple(islice(found, limit))
            return page[::-1] if which.last else page

    def _is_wanted(self, event: Event, job_id: str | None, which: Which) -> bool:
        return (
            (job_id is None or event.job_id == job_id)
            and (which.kinds is None or event.kind in which.kinds)
            and (which.since_s is None or event.at_s >= which.since_s)
            and (which.tenant is None or self._concerns(event, which.tenant))
        )

    def _concerns(self, event: Event, tenant: str) -> bool:
        if event.job_id is None:
            return event.kind.startswith(CONCERN_ALL)
        return self._heads[event.job_id].tenant == tenant

    def last_seq(self) -> int:
        with self._lock:
            return len(self._events)

    def draining(self) -> frozenset[str]:
        with self._lock:
            return self._draining

    def set_draining(self, nodes: frozenset[str]) -> None:
        with self._lock:
            self._draining = nodes
