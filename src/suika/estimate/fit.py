"""Fit the named factors to measured cases: maximum a posteriori in log space.

For case i of family f: log(measured) = log(predicted(theta)) + b_f + noise, noise pseudo-Huber at 0.08, b_f a random
intercept per family (what its framework, version and clocks add) that is dropped when predicting. A family's rows weigh
as at most 40, so that one big table of tiny models does not own the fit. Run `python -m suika.estimate.fit CASES.csv`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from suika.estimate.cases import Case, parse_cases
from suika.estimate.columns import Array
from suika.estimate.factors import OP_CLASSES, PRIOR_SD, parameters
from suika.estimate.grid import Grid
from suika.estimate.step import price
from suika.estimate.table import read_rows

HUBER = 0.08
FAMILY_SD = 0.05
PRIOR_SHARE = 0.15  # of a job's prior spread that is left for what all jobs have in common
FAMILY_ROWS = 40
STEP = 1e-4  # of a log factor, for slopes


def fit(cases: Sequence[Case]) -> dict[str, float]:
    """Parameter -> log factor on time, from the cases that have a measured iteration time."""
    timed = [case for case in cases if case.step_s]
    if not timed:
        return {}
    grid = Grid.stack([case.grid(fitted={}) for case in timed])
    measured = np.log(np.array([case.step_s for case in timed], dtype=float))
    named = [parameters(case.device, case.recipe, case.precision) for case in timed]
    names = sorted({name for row in named for name in row.values()})
    index = {name: i for i, name in enumerate(names)}
    column = {c: np.array([index[row[c]] for row in named]) for c in OP_CLASSES}
    prior = np.array([_prior_sd(name) for name in names])
    family, weight = _families(timed)
    rows, num_names, num_families = np.arange(len(timed)), len(names), int(family.max()) + 1

    def log_predicted(log: dict[str, Array]) -> Array:
        return np.log(price(grid, log).step_s)

    def factors(x: Array) -> dict[str, Array]:
        return {c: x[column[c]] for c in OP_CLASSES}

    def error(x: Array) -> Array:
        return measured - log_predicted(factors(x)) - x[num_names:][family]

    def residuals(x: Array) -> Array:
        e = error(x)
        bent = np.sign(e) * np.sqrt(2 * (np.sqrt(1 + (e / HUBER) ** 2) - 1))
        return np.concatenate((weight * bent, x[:num_names] / prior, x[num_names:] / FAMILY_SD))

    def jacobian(x: Array) -> Array:
        log, e = factors(x), error(x)
        base = log_predicted(log)
        root = np.sqrt(1 + (e / HUBER) ** 2)
        bend = weight * np.where(abs(e) < 1e-6, 1.0, abs(e) / HUBER / root / np.sqrt(2 * (root - 1) + 1e-30)) / HUBER
        j = np.zeros((len(x) + len(timed), len(x)))
        for c in OP_CLASSES:
            slope = (log_predicted(log | {c: log[c] + STEP}) - base) / STEP
            j[rows, column[c]] -= bend * slope
        j[rows, num_names + family] -= bend
        j[len(timed) + np.arange(len(x)), np.arange(len(x))] = 1 / np.concatenate(
            (prior, np.full(num_families, FAMILY_SD))
        )
        return j

    found = least_squares(residuals, np.zeros(num_names + num_families), jacobian, xtol=1e-6, ftol=1e-6)
    return {name: round(float(value), 4) for name, value in zip(names, found.x, strict=False)}


def _prior_sd(name: str) -> float:
    return PRIOR_SHARE * PRIOR_SD[name.split("/")[0]]


def _families(cases: Sequence[Case]) -> tuple[Array, Array]:
    """Family number of each case, and the square root of its weight."""
    keys = [(case.source, case.gpu_type, case.bucket) for case in cases]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    family = np.array([numbers[key] for key in keys])
    size = np.bincount(family)
    return family, np.sqrt(np.minimum(1.0, FAMILY_ROWS / size))[family]


def main() -> None:
    """Refit the shipped factors from a table of cases."""
    cases, _ = parse_cases(read_rows(Path(sys.argv[1])))
    target = Path(__file__).parent / "data" / "factors.json"
    values = fit(cases)
    document = {"version": 1, "made_by": "python -m suika.estimate.fit", "cases": len(cases), "log_factors": values}
    target.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
