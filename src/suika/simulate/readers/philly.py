"""Microsoft Philly (ATC'19), cluster_job_log: a JSON list of {jobid, vc, user, status, submitted_time, attempts}, each
attempt with start_time, end_time and detail, a list of {ip, gpus}. Dates in local time.

A job's devices are those of its last attempt; its duration spans the first start to the last end, retries included, as
the trace does not say what was lost between attempts. The "line" of a dirty entry is its place in the list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from suika.core.errors import SpecError
from suika.simulate.readers.rows import moment, span
from suika.simulate.trace import BadRowError, Row, TraceJob


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise SpecError("jobs", str(path), f"is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise SpecError("jobs", str(path), "must be a JSON list of jobs")
    for place, entry in enumerate(entries, start=1):
        try:
            yield place, _job(entry)
        except BadRowError as bad:
            yield place, bad


def _job(entry: Any) -> TraceJob:
    if not isinstance(entry, dict) or not isinstance(entry.get("jobid"), str):
        raise BadRowError("has no jobid")
    attempts = [a for a in _list(entry, "attempts") if isinstance(a, dict)]
    if not attempts:
        raise BadRowError("was never started")
    started_s = min(moment(_texts(a), "start_time") for a in attempts)
    ended_s = max(moment(_texts(a), "end_time") for a in attempts)
    num = sum(len(_list(part, "gpus")) for part in _list(attempts[-1], "detail") if isinstance(part, dict))
    submit_s = moment(_texts(entry), "submitted_time")
    return TraceJob(entry["jobid"], submit_s, num, span(started_s, ended_s), tenant=str(entry.get("vc") or "default"))


def _list(record: dict[str, Any], key: str) -> list[Any]:
    found = record.get(key) or []
    if not isinstance(found, list):
        raise BadRowError(f"{key} is no list")
    return found


def _texts(record: dict[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else "" for key, value in record.items()}
