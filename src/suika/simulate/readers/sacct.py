"""Slurm accounting, as `sacct -P -X -o JobID,User,Account,Submit,Start,End,ElapsedRaw,AllocTRES,State` prints it.

Devices are `gres/gpu=N` of AllocTRES, or where only types are given the sum of `gres/gpu:TYPE=N`. Rows of job steps
(`123.batch`) belong to their job and are skipped; jobs without GPUs are not ours; jobs that have not ended are listed
as dirty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from suika.simulate.readers.rows import csv_rows, moment, number, span
from suika.simulate.trace import BadRowError, Row, TraceJob

_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TYPED = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    return csv_rows(text, _job, delimiter="|")


def _job(row: Mapping[str, str]) -> TraceJob | None:
    if "." in row["JobID"]:
        return None
    allocated = row.get("AllocTRES", "")
    whole = _GPUS.findall(allocated)[:1] or _TYPED.findall(allocated)
    if not whole:
        if allocated:
            return None
        raise BadRowError("AllocTRES is empty: it was never given anything")
    if row.get("ElapsedRaw"):
        duration_s = number(row, "ElapsedRaw")
    else:
        duration_s = span(moment(row, "Start"), moment(row, "End"))
    if row.get("State", "").startswith(("RUNNING", "PENDING")):
        raise BadRowError(f"has not ended ({row['State']})")
    tenant = row.get("Account") or row.get("User") or "default"
    return TraceJob(row["JobID"], moment(row, "Submit"), sum(map(int, whole)), duration_s, tenant=tenant)
