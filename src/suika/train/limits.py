"""What the built-in trainer can run. Needs no torch: whoever accepts a job asks before anything starts."""

from __future__ import annotations

from suika.core.errors import require
from suika.core.job import JobSpec
from suika.core.layout import Layout, check_layout


def check_runnable(spec: JobSpec, layout: Layout) -> None:
    """Raise `SpecError` unless the built-in trainer can run `spec` under `layout`."""
    check_layout(layout, spec.model, spec.global_batch, spec.sequence_length)
    for field, most in (("cp", 1), ("zero", 1)):
        value = getattr(layout, field)
        require(value <= most, f"layout.{field}", value, "the built-in trainer cannot run it", f"use {most}")
