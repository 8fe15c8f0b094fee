"""Alibaba Lingjun 2023 (Crux, SIGCOMM'24), job.csv with worker.csv beside it.

job.csv: job_name, model, priority, gmt_job_submitted, gmt_job_running, gmt_job_finished or gmt_job_stopped (dates to
the minute). worker.csv: one row per worker of a job with RES, a JSON text of its resources; their "nvidia.com/gpu" add
up.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from suika.core.errors import SpecError
from suika.simulate.readers.rows import EMPTY, csv_rows, csv_rows_of, moment, span
from suika.simulate.trace import BadRowError, Row, TraceJob, text_of

DATE = ("%Y/%m/%d %H:%M", "%Y/%m/%d %H:%M:%S")


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    devices = _devices(path)

    def job(row: Mapping[str, str]) -> TraceJob:
        ends = "gmt_job_finished" if row.get("gmt_job_finished", "").lower() not in EMPTY else "gmt_job_stopped"
        started_s, ended_s = moment(row, "gmt_job_running", *DATE), moment(row, ends, *DATE)
        submit_s = moment(row, "gmt_job_submitted", *DATE)
        if started_s < submit_s:
            raise BadRowError("runs before it is submitted")
        if row["job_name"] not in devices:
            raise BadRowError("no worker with GPUs in worker.csv")
        num = devices[row["job_name"]]
        return TraceJob(
            row["job_name"], submit_s, num, span(started_s, ended_s), tenant=row.get("tenant_id") or "default"
        )

    return csv_rows(text, job)


def _devices(path: Path) -> Counter[str]:
    """GPUs per job name, from the worker table beside the job table."""
    beside = next((at for name in ("worker.csv", "worker.csv.gz") if (at := path.with_name(name)).is_file()), None)
    if beside is None:
        raise SpecError("jobs", str(path), "no worker.csv beside it", "the trace says the GPUs of a job only there")
    found: Counter[str] = Counter()
    for _, row in csv_rows_of(text_of(beside)):
        try:
            resources = json.loads((row or {}).get("RES") or "{}")
            found[(row or {})["job_name"]] += int(float(resources.get("nvidia.com/gpu", 0)))
        except (ValueError, TypeError, AttributeError, OverflowError, KeyError):
            continue  # a worker without a readable resource text holds no GPUs that we know of
    return Counter({name: num for name, num in found.items() if num > 0})
