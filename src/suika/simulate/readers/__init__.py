"""Readers of public trace formats: `FORMATS[name](text, path, time_unit)` yields (line, job or what is wrong)."""

from __future__ import annotations

from collections.abc import Mapping

from suika.core.errors import SpecError
from suika.simulate.readers import acme, helios, lingjun, pai, philly, rubick, sacct, suika
from suika.simulate.trace import Reader

FORMATS: Mapping[str, Reader] = {
    "suika": suika.read,
    "philly": philly.read,
    "helios": helios.read,
    "acme": acme.read,
    "pai": pai.read,
    "lingjun": lingjun.read,
    "rubick": rubick.read,
    "sacct": sacct.read,
}


def detect(text: str) -> str:
    """The format of a file, by its first line."""
    first = text.lstrip().split("\n", 1)[0].strip().lower()
    columns = set(first.replace("|", ",").split(","))
    if not first:
        raise SpecError("jobs", "", "the file is empty")
    if first.startswith(("[", "{")):
        return "philly"
    if "|" in first and "jobid" in columns:
        return "sacct"
    if {"submission_time", "application"} <= columns:
        return "rubick"
    if "gmt_job_submitted" in columns:
        return "lingjun"
    if {"submit_time", "gpu_num"} <= columns:
        return "acme" if "gpu_time" in columns or "mem_per_pod_gb" in columns else "helios"
    if "plan_gpu" in columns:
        return "pai"
    if {"job_id", "gpus"} <= columns:
        return "suika"
    raise SpecError(
        "format", first[:80], "no known trace format has these columns", f"say --format: {', '.join(FORMATS)}"
    )
