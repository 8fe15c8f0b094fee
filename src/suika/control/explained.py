"""The estimator's word on one running job: predicted beside measured, other layouts, and what it has learned."""

from __future__ import annotations

from typing import Any

from suika.control.learned import Learned
from suika.control.views import Pricing
from suika.core.job import Job
from suika.core.plan import Plan
from suika.estimate.knowledge import Known


def explained(
    job: Job, plan: Plan, measured_step_s: float | None, learned: Learned, pricing: Pricing
) -> dict[str, Any]:
    """`predicted_step_s` is calibrated, `cold_step_s` is what the catalog alone says; `pace` (measured / predicted,
    when it was noted last) scales the others. `calibration` is None until the job itself was measured here."""
    device_type, known = pricing.device_type(plan), learned.of(job.id)
    own = learned.own(job.id).get(device_type)
    here = next((k for k in known if k.device_type == device_type), None)
    predicted = pricing.step_s(job.spec, plan, known)
    return {
        "device_type": device_type,
        "layout": plan.layout.to_dict(),
        "measured_step_s": measured_step_s,
        "predicted_step_s": predicted,
        "error_percent": 100 * (predicted / measured_step_s - 1) if measured_step_s else None,
        "cold_step_s": pricing.step_s(job.spec, plan),
        "pace": here.pace if here else None,
        "others": pricing.others(job.spec, plan, known),
        "calibration": _calibration(own) if own else None,
    }


def _calibration(known: Known) -> dict[str, Any]:
    c = known.calibration
    return {
        "version": c.version,
        "num_samples": c.num_samples,
        "layouts": [
            {"layout": s.layout.to_dict(), "num_samples": s.num_samples, "parts_s": dict(s.parts_s)} for s in known.seen
        ],
        "factors": c.table(),
    }
