"""Our own CSV: job_id, submit_s, gpus, duration_s, and what else is known.

Units stand in the column names (`submit_s` or `submit_ms`). Optional: user or tenant, model, steps, min_gpus, max_gpus,
priority (a whole number; higher goes first, strictly), weight (above 0; 1 where it is empty: how much a second of this
job counts against a second of others of its priority), deadline_s (a length from submission on).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from suika.core.errors import require
from suika.simulate.readers.rows import csv_rows, header, number, optional, optional_whole, unit_s, whole
from suika.simulate.trace import BadRowError, Row, TraceJob


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    columns = header(text)
    for column in ("job_id", "gpus"):
        require(column in columns, "jobs", str(path), f"no column {column}")
    submit, submit_unit = unit_s(columns, "submit", time_unit)
    duration, duration_unit = unit_s(columns, "duration", time_unit)

    def job(row: Mapping[str, str]) -> TraceJob:
        if not row["job_id"]:
            raise BadRowError("job_id is missing")
        deadline = optional(row, "deadline_s", -1.0)
        submit_s = number(row, submit) * submit_unit
        return TraceJob(
            row["job_id"],
            submit_s,
            whole(row, "gpus"),
            number(row, duration) * duration_unit,
            tenant=row.get("tenant") or row.get("user") or "default",
            model=row.get("model", ""),
            num_steps=optional(row, "steps"),
            min_devices=optional_whole(row, "min_gpus"),
            max_devices=optional_whole(row, "max_gpus"),
            priority=optional_whole(row, "priority"),
            weight=optional(row, "weight", 1.0),
            deadline_s=None if deadline < 0 else submit_s + deadline,
        )

    return csv_rows(text, job)
