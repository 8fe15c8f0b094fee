"""SenseTime Helios (SC'21), cluster_log.csv: submit_time as a date, duration in seconds, gpu_num, vc, user, state.

Jobs without GPUs are CPU jobs: no dirty rows, simply not ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from suika.simulate.readers.rows import csv_rows, moment, number, span, whole
from suika.simulate.trace import Row, TraceJob


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    def job(row: Mapping[str, str]) -> TraceJob | None:
        if whole(row, "gpu_num") == 0 and row.get("cpu_num", "") not in ("", "0"):
            return None
        submit_s = moment(row, "submit_time")
        if row.get("duration"):
            duration_s = number(row, "duration")
        else:
            duration_s = span(moment(row, "start_time"), moment(row, "end_time"))
        return TraceJob(row["job_id"], submit_s, whole(row, "gpu_num"), duration_s, tenant=row.get("vc") or "default")

    return csv_rows(text, job)
