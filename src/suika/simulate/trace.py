"""Traces: jobs as some cluster recorded them. Dirty rows are listed with line and reason, never guessed at."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from suika.core.errors import SpecError

LONGEST_S = 1e11  # three thousand years: times and lengths beyond are mistakes of units, as are so many steps
MOST_STEPS = 1e9


@dataclass(frozen=True)
class TraceJob:
    """One job of a trace. Times are seconds; `duration_s` is the run time at `devices`. 0 or "": not in the trace."""

    id: str
    submit_s: float
    devices: int
    duration_s: float
    tenant: str = "default"
    model: str = ""
    num_steps: float = 0.0
    min_devices: int = 0
    max_devices: int = 0
    priority: int = 0
    weight: float = 1.0
    deadline_s: float | None = None


@dataclass(frozen=True)
class DirtyRow:
    line: int  # in the file, from 1
    reason: str


@dataclass(frozen=True)
class Trace:
    """Jobs by (submission, id), the first submission at 0."""

    name: str
    format: str
    jobs: tuple[TraceJob, ...]
    dirty: tuple[DirtyRow, ...] = ()


class BadRowError(ValueError):
    """Raised by a reader for a row that cannot be a job; its text is the reason."""


Row = tuple[int, TraceJob | BadRowError]  # (line, what it holds)


def read_trace(path: str | Path, format: str = "auto", time_unit: str | None = None) -> Trace:
    """The trace in the file at `path` (`.gz` is read as it is).

    `time_unit` (s or ms) is for files that do not say theirs. Raises `SpecError` for an unknown format, an undeclared
    unit, or a file without a single good row.
    """
    from suika.simulate.readers import FORMATS, detect

    path = Path(path)
    text = text_of(path)
    if format == "auto":
        format = detect(text)
    if format not in FORMATS:
        raise SpecError("format", format, "unknown trace format", f"known: auto, {', '.join(FORMATS)}")
    if time_unit not in (None, "s", "ms"):
        raise SpecError("time-unit", time_unit, "unknown unit", "use s or ms")
    jobs, dirty = _sift(FORMATS[format](text, path, time_unit))
    if not jobs:
        reasons = "; ".join(f"line {row.line}: {row.reason}" for row in dirty[:3]) or "the file holds no rows"
        raise SpecError("jobs", str(path), f"no usable row in this {format} trace ({reasons})")
    first_s = min(job.submit_s for job in jobs)
    ordered = sorted(jobs, key=lambda job: (job.submit_s, job.id))
    shifted = tuple(replace(job, submit_s=job.submit_s - first_s) for job in ordered)
    return Trace(path.name, format, shifted, tuple(dirty))


def text_of(path: Path) -> str:
    """The text in a file, unpacked if it is `.gz`; raises `SpecError` if it cannot be read."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
        return raw.decode("utf-8-sig")  # a byte-order mark is no part of the first column's name
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise SpecError("jobs", str(path), f"cannot be read: {error}") from None


def _sift(rows: Iterator[Row]) -> tuple[list[TraceJob], list[DirtyRow]]:
    """Good jobs and dirty rows: the rules that hold for every format."""
    jobs: list[TraceJob] = []
    dirty: list[DirtyRow] = []
    seen: dict[str, int] = {}
    for line, found in rows:
        reason = str(found) if isinstance(found, BadRowError) else _problem(found, seen)
        if reason or isinstance(found, BadRowError):
            dirty.append(DirtyRow(line, reason))
        else:
            seen[found.id] = line
            jobs.append(found)
    return jobs, dirty


def _problem(job: TraceJob, seen: dict[str, int]) -> str:
    if not job.id:
        return "has no id"
    if job.id in seen:
        return f"duplicate id {job.id}, first on line {seen[job.id]}"
    if job.devices < 1:
        return f"asks for {job.devices} devices"
    if not 0 <= job.submit_s < LONGEST_S:
        return f"submission at {job.submit_s:g} s"
    if not 0 < job.duration_s < LONGEST_S:
        return f"lasts {job.duration_s:g} s" if job.duration_s == job.duration_s else "duration is not a number"
    if not 0 <= job.num_steps <= MOST_STEPS:
        return f"has {job.num_steps:g} steps"
    if min(job.min_devices, job.max_devices) < 0:
        return f"runs on {min(job.min_devices, job.max_devices)} devices"
    if job.min_devices > job.max_devices > 0:
        return f"min_devices({job.min_devices}) > max_devices({job.max_devices})"
    if not -1000 <= job.priority <= 1000:
        return f"priority {job.priority} is outside -1000..1000"
    if not 0 < job.weight < 1e9:
        return f"weight {job.weight:g} is not a number above 0"
    return ""


Reader = Callable[[str, Path, str | None], Iterator[Row]]


def lines(text: str) -> io.StringIO:
    return io.StringIO(text, newline="")
