"""Alibaba PAI (NSDI'22), pai_task_table.csv with its header line: job_name, task_name, inst_num, status, start_time,
end_time (seconds since the trace began; 0 = before it), plan_gpu (percent of a device per instance).

Tasks of one job make one gang; it holds the sum of its tasks' devices from the first start to the last end. The trace
says when tasks start, not when jobs are submitted: the start stands for the submission. Jobs whose tasks share devices
(plan_gpu not a multiple of 100) are listed as dirty, since gangs hold whole devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from suika.simulate.readers.rows import csv_rows, number, optional, span, whole
from suika.simulate.trace import BadRowError, Row, TraceJob


def read(text: str, path: Path, time_unit: str | None) -> Iterator[Row]:
    first: dict[str, tuple[int, TraceJob]] = {}
    for line, task in csv_rows(text, _task):
        if isinstance(task, BadRowError):
            yield line, task
        elif task.id in first:
            at, job = first[task.id]
            start_s = min(job.submit_s, task.submit_s)
            end_s = max(job.submit_s + job.duration_s, task.submit_s + task.duration_s)
            first[task.id] = (
                at,
                replace(job, submit_s=start_s, duration_s=end_s - start_s, devices=job.devices + task.devices),
            )
        else:
            first[task.id] = line, task
    yield from first.values()


def _task(row: Mapping[str, str]) -> TraceJob | None:
    percent = optional(row, "plan_gpu")
    if percent == 0:
        return None  # a task without devices, e.g. a parameter server
    if percent % 100:
        raise BadRowError(f"plan_gpu={percent:g} is not a whole number of devices (100 = one)")
    start_s = number(row, "start_time")
    if start_s == 0:
        raise BadRowError("start_time=0: before the trace began")
    duration_s = span(start_s, number(row, "end_time"))
    num = int(percent) // 100 * whole(row, "inst_num")
    return TraceJob(row["job_name"], start_s, num, duration_s, tenant=row.get("user") or "default")
