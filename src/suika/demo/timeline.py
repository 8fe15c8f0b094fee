"""What happened, as intervals: who held which device in which layout, and when training paused. From events alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from suika.control.store import Event
from suika.core.layout import Layout


@dataclass(frozen=True)
class Span:
    """One generation of a job on one device. Seconds since the first event."""

    job: str
    device: str
    layout: str
    generation: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Mark:
    """A moment that the picture shows: an event of the script, or a commit."""

    at_s: float
    text: str


@dataclass(frozen=True)
class Timeline:
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    stop_s: float


def timeline(events: Iterable[Event], names: Mapping[str, str], marks: Iterable[Mark] = ()) -> Timeline:
    """Intervals of all jobs (`names`: id -> name). A span ends at the commit that replaces it, or at the job's end."""
    events = list(events)
    origin_s = events[0].at_s if events else 0.0
    stop_s = events[-1].at_s - origin_s if events else 0.0
    open_: dict[str, tuple[dict[str, Any], int, float]] = {}  # job id -> plan, generation, since
    spans: list[Span] = []

    def close(job_id: str, at_s: float) -> None:
        if job_id not in open_:
            return
        plan, generation, since_s = open_.pop(job_id)
        layout = str(Layout.from_dict(plan["layout"]))
        spans.extend(Span(names[job_id], d, layout, generation, since_s, at_s) for d in plan["devices"])

    for event in events:
        at_s = event.at_s - origin_s
        if event.job_id is None:
            continue
        if event.kind in ("launched", "committed"):
            close(event.job_id, at_s)
            open_[event.job_id] = (event.data["plan"], event.data["generation"], at_s)
        elif event.kind in ("job-finished", "job-failed", "job-cancelled", "job-recovering", "job-preempting"):
            close(event.job_id, at_s)
    for job_id in list(open_):
        close(job_id, stop_s)
    return Timeline(tuple(spans), tuple(marks), stop_s)
