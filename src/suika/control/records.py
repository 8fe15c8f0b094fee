"""A `Job` as plain JSON data and back."""

from __future__ import annotations

import json
from typing import Any

from suika.core.decision import Reason, ReasonCode
from suika.core.job import Job, JobSpec, JobState, parse_job
from suika.core.plan import Plan

_PLAIN = ("last_generation", "started_s", "ended_s", "num_moves", "num_recoveries", "exit_code", "not_before_s")


def job_row(job: Job) -> dict[str, Any]:
    """The columns of a job's row, apart from its spec's."""
    record = {name: getattr(job, name) for name in _PLAIN} | {
        "reason": {"code": job.reason.code, "sentence": job.reason.sentence},
        "plan": job.plan and job.plan.to_dict(),
        "target": job.target and job.target.to_dict(),
    }
    return {
        "id": job.id,
        "tenant": job.spec.tenant,
        "name": job.spec.name,
        "state": job.state.value,
        "submitted_s": job.submitted_s,
        "generation": job.generation,
        "version": job.version,
        "steps_done": job.steps_done,
        "record": json.dumps(record, allow_nan=False),
    }


def spec_text(spec: JobSpec) -> str:
    return json.dumps(spec.model_dump(mode="json"), allow_nan=False)


def job_of(row: Any) -> Job:
    """The job of a row of table `jobs`."""
    record = json.loads(row.record)
    reason = record["reason"]
    return Job(
        id=row.id,
        spec=parse_job(json.loads(row.spec)),
        submitted_s=row.submitted_s,
        state=JobState(row.state),
        reason=Reason(ReasonCode(reason["code"]), reason["sentence"]),
        generation=row.generation,
        plan=_plan(record["plan"]),
        target=_plan(record["target"]),
        steps_done=row.steps_done,
        version=row.version,
        **{name: record[name] for name in _PLAIN if name in record},  # an older version knew fewer
    )


def _plan(data: dict[str, Any] | None) -> Plan | None:
    return None if data is None else Plan.from_dict(data)
