"""The workload of the Rubick artifact: name, submission_time and duration in seconds, application, num_gpus, steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from suika.simulate.readers.rows import csv_rows, number, whole
from suika.simulate.trace import Row, TraceJob


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    def job(row: Mapping[str, str]) -> TraceJob:
        return TraceJob(
            row["name"],
            number(row, "submission_time"),
            whole(row, "num_gpus"),
            number(row, "duration"),
            model=row["application"],
            num_steps=number(row, "steps"),
        )

    return csv_rows(text, job)
