"""Fitted factors: which named parameters scale which op class of a run, and their shipped values (log space).

A parameter multiplies the time of one op class for all runs that share a device generation, a kernel, a precision or a
framework: few enough to be identified, physical enough to hold for runs nobody fitted on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from suika.estimate.catalog import DeviceType
from suika.estimate.recipe import Recipe

# Op classes, each with a log factor; and the prior standard deviation of its log for a device and job nobody measured.
PRIOR_SD = {
    "gemm": 0.06,
    "low": 0.10,
    "attention": 0.20,
    "vector": 0.20,
    "tp": 0.25,
    "cp": 0.35,
    "ep": 0.35,
    "p2p": 0.40,
    "dp": 0.40,
    "network": 0.35,
    "host": 0.30,
    "optimizer": 0.40,
}
OP_CLASSES = tuple(PRIOR_SD)


def parameters(device: DeviceType, recipe: Recipe, precision: str) -> dict[str, str]:
    """Op class -> name of the parameter that scales it in such a run."""
    generation = device.generation
    stack = "unfused" if recipe.attention == "unfused" else "fsdp" if recipe.host_scale > 1.6 else "fused"
    return {
        "gemm": f"gemm/{generation}",
        "low": f"low/{precision}" + ("/ultra" if generation == "blackwell-ultra" and precision == "nvfp4" else ""),
        "attention": f"attention/{recipe.attention}/{generation}",
        "vector": f"vector/{stack}",
        "tp": f"tp/{generation}",
        "cp": "cp",
        "ep": "ep",
        "p2p": "p2p",
        "dp": "dp",
        "network": "network",
        "host": f"host/{stack}",
        "optimizer": "optimizer",
    }


@cache
def shipped() -> dict[str, float]:
    """Parameter -> log factor on time, as `suika.estimate.fit` last wrote them."""
    found = files("suika.estimate") / "data" / "factors.json"
    data: dict[str, Any] = json.loads(found.read_text()) if found.is_file() else {"log_factors": {}}
    return dict(data["log_factors"])


def log_factors(
    device: DeviceType, recipe: Recipe, precision: str, fitted: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Op class -> log factor of such a run; a parameter that was not fitted is 0 (the curves' own value)."""
    values = shipped() if fitted is None else fitted
    return {c: values.get(name, 0.0) for c, name in parameters(device, recipe, precision).items()}
