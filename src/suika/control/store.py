"""What the controller must not forget: jobs (compare-and-set), append-only events, drained nodes.

The interface is small on purpose: everything else the controller knows can be observed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from suika.core.job import Job, JobState


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
class Which:
    """Which events are asked for: of these kinds only; below this number; not earlier than this; only what concerns
    this tenant, its own jobs' and those of nodes and devices. `last`: not the first of them, but the last."""

    kinds: frozenset[str] | None = None
    before: int | None = None
    since_s: float | None = None
    tenant: str | None = None
    last: bool = False


EVERY = Which()
CONCERN_ALL = ("node-", "device-")  # how the kinds of those events begin


@dataclass(frozen=True)
class News:
    """An event that is still to be numbered: it is stored together with the record that it tells of, or not at all."""

    at_s: float
    kind: str
    data: Mapping[str, Any] = field(default_factory=dict)


class Head(NamedTuple):
    """What a list of jobs needs of each: cheap for jobs that ended long ago and are not read again. In this order."""

    submitted_s: float
    id: str
    name: str
    tenant: str
    state: JobState

    @staticmethod
    def of(job: Job) -> Head:
        return Head(job.submitted_s, job.id, job.spec.name, job.spec.tenant, job.state)


class StaleWriteError(RuntimeError):
    """Somebody else changed the record first: the writer's view is out of date and its write did not happen."""


class StoreAwayError(RuntimeError):
    """The store cannot be written now: its disk is full, its server is gone. The write did not happen."""


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

    def active(self) -> tuple[Job, ...]:
        """Those that have not ended, in the same order."""
        ...

    def heads(self) -> tuple[Head, ...]:
        """All jobs in the same order, in short."""
        ...

    def named(self, name: str) -> tuple[Head, ...]:
        """The jobs that bear this name or id, in the same order."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Within it this thread's writes are one: all of them happen, or none. Others' wait."""
        ...

    def saved(self, job_id: str, generation: int, step: int, path: str) -> bool:
        """Record a complete snapshot: from now on a replacement starts from it. False, and no change, unless
        `generation` is the job's present one and the job has not ended."""
        ...

    def snapshot(self, job_id: str) -> tuple[str, int] | None:
        """(path, steps done in it) of the job's newest recorded snapshot."""
        ...

    def calibrated(self, job_id: str, device_type: str, record: Mapping[str, Any]) -> None:
        """Replace what is known of a job's speed on a device type: JSON data, as `estimate.knowledge` writes it."""
        ...

    def calibrations(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        """By (job id, device type), in the order of their last change."""
        ...

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event: ...

    def events(
        self, after: int = 0, job_id: str | None = None, limit: int | None = None, which: Which = EVERY
    ) -> tuple[Event, ...]:
        """Events with `seq` > `after`, oldest first, at most `limit`: the first of those that `which` wants, or, if it
        says so, the last of them."""
        ...

    def last_seq(self) -> int:
        """Of the newest event; 0: there is none."""
        ...

    def draining(self) -> frozenset[str]: ...

    def set_draining(self, nodes: frozenset[str]) -> None: ...
