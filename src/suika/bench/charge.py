"""What a decision costs in CPU seconds, as a formula: measures the constants of `suika.simulate.charge`.

`suika bench decide` is run at several sizes; base + per_job x jobs + per_device x devices is fitted to the medians by
least squares of relative errors, no term below zero. The constants in use stand beside the fit, with their errors.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import typer
from scipy.optimize import nnls

from suika.bench import decide
from suika.simulate import charge

SIZES = ((8, 10), (8, 30), (32, 60), (128, 128), (128, 400), (1250, 1250))  # (nodes of 8 devices, jobs)


def run(
    samples: Annotated[int, typer.Option(help="Decisions to time at each size.")] = 60,
    policy: Annotated[str, typer.Option(help="Policy to time.")] = "suika",
    largest: Annotated[int, typer.Option(help="Leave out clusters of more nodes.")] = 1250,
) -> dict[str, Any]:
    """Fit the formula by which simulations charge decisions."""
    rows = [
        decide.run(nodes=nodes, devices_per_node=8, jobs=jobs, samples=samples, policy=policy)
        for nodes, jobs in SIZES
        if nodes <= largest
    ]
    taken_s = np.array([row["decision_ms"]["p50"] / 1e3 for row in rows])
    sizes = np.array([[1.0, row["jobs"], row["devices"]] for row in rows])
    fitted, _ = nnls(sizes / taken_s[:, None], np.ones(len(rows)))
    used = np.array([charge.BASE_S, charge.PER_JOB_S, charge.PER_DEVICE_S])
    return {
        "fitted": dict(zip(("base_s", "per_job_s", "per_device_s"), fitted.tolist(), strict=True)),
        "used": dict(zip(("base_s", "per_job_s", "per_device_s"), used.tolist(), strict=True)),
        "cases": [
            {
                "devices": row["devices"],
                "jobs": row["jobs"],
                "measured_s": float(measured_s),
                "fitted_s": float(size @ fitted),
                "charged_s": charge.decision_s(row["devices"], row["jobs"]),
            }
            for row, measured_s, size in zip(rows, taken_s, sizes, strict=True)
        ],
    }
