"""Shanghai AI Lab Acme (NSDI'24), trace_seren.csv and trace_kalos.csv: dates with time zone, duration in seconds,
gpu_num in all. Jobs without GPUs are CPU jobs: not ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from suika.simulate.readers.rows import csv_rows, moment, number, whole
from suika.simulate.trace import Row, TraceJob


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    def job(row: Mapping[str, str]) -> TraceJob | None:
        num = whole(row, "gpu_num")
        if num == 0 and row.get("cpu_num", "") not in ("", "0", "0.0"):
            return None
        return TraceJob(
            row["job_id"],
            moment(row, "submit_time"),
            num,
            number(row, "duration"),
            tenant=row.get("user") or "default",
        )

    return csv_rows(text, job)
