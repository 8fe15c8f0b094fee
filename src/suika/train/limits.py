"""What the built-in trainer can run. Needs no torch: whoever accepts a job asks before anything starts."""

from __future__ import annotations

from suika.core.errors import require
from suika.core.job import JobSpec
from suika.core.layout import Layout, check_layout, micro_batch_shares


def check_runnable(spec: JobSpec, layout: Layout) -> None:
    """Raise `SpecError` unless the built-in trainer can run `spec` under `layout`."""
    check_layout(layout, spec.model, spec.global_batch, spec.sequence_length)
    require(layout.zero != 2, "layout.zero", 2, "the built-in trainer cannot run it", "use 0, 1 or 3")
    if layout.zero == 3:
        shares = micro_batch_shares(spec.global_batch, layout.micro_batch, layout.dp)
        even, fix = len(set(shares)) == 1, "let micro_batch x dp divide the global batch: all gather weights in step"
        require(even, "layout.zero", 3, f"dp ranks have {shares} micro-batches", fix)
