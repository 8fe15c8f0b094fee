"""How well measured cases are predicted, family by family: never pooled over families.

A family is source x gpu_type x gpus_bucket; each (source, gpu_type) also has a row over both buckets. Errors and regret
are in percent, coverages are fractions. Calibration stays inside a group: cases that share source, device type, model,
sequence, precision and a size bucket.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from suika.core.errors import SpecError, require
from suika.estimate.calibrate import HALF_WIDTH, ROW_SD, prior_covariance, slopes, updated
from suika.estimate.cases import Case, Skipped, groups
from suika.estimate.columns import RECOMPUTE, Array
from suika.estimate.factors import shipped
from suika.estimate.fit import fit
from suika.estimate.grid import Grid
from suika.estimate.memory import memory
from suika.estimate.predict import COLD_SHARE

Calibrate = Literal["none", "one", "three"]


def evaluate(
    cases: Sequence[Case], skipped: Sequence[Skipped], calibrate: Calibrate = "none", leave_out: str | None = None
) -> dict[str, Any]:
    """The report. `leave_out` (SOURCE, SOURCE/TYPE or SOURCE/TYPE/BUCKET) refits the factors without those cases."""
    fitted = shipped()
    if leave_out is not None:
        require(bool(leave_out.strip("/|:, ")), "leave_out", leave_out, "is empty", "write SOURCE[/GPU_TYPE[/BUCKET]]")
        left = [case for case in cases if matches(case, leave_out)]
        if not left:
            known = sorted({case.family for case in cases})
            raise SpecError("leave_out", leave_out, "names no family of these cases", f"known: {', '.join(known)}")
        fitted = fit([case for case in cases if not matches(case, leave_out)])
    predictions = _Predictions(cases, fitted)
    errors = _calibrated(predictions, calibrate)
    families = [_family(cases, skipped, predictions, errors, key, calibrate) for key in _families(cases, skipped)]
    units = {"ape": "percent", "choice_regret": "percent", "coverage": "fraction"}
    return {"calibrate": calibrate, "leave_out": leave_out, "units": units, "families": families}


def leave_one_family_out(cases: Sequence[Case], skipped: Sequence[Skipped]) -> dict[str, Any]:
    """The honest cold table: each family predicted by factors that were fitted without it."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    spliced = np.full(len(cases), np.nan)
    sigma = np.full(len(cases), np.nan)
    for family in sorted({case.family for case in cases}):
        fitted = fit([case for case in cases if case.family != family])
        own = [i for i, case in enumerate(cases) if case.family == family]
        part = _Predictions([cases[i] for i in own], fitted)
        spliced[own], sigma[own] = part.surprise, part.sigma
    whole = _Predictions(cases, {})
    whole.surprise, whole.sigma = spliced, sigma
    errors = _calibrated(whole, "none")
    for key in _families(cases, skipped):
        rows[key] = _family(cases, skipped, whole, errors, key, "none")
    return {"calibrate": "none", "leave_out": "each family in turn", "families": list(rows.values())}


def matches(case: Case, family: str) -> bool:
    parts = [part.strip().lower() for part in re.split(r"[/|:,]", family)]
    own = (case.source.lower(), case.gpu_type.lower(), case.bucket)
    return all(part in ("", "all", mine) for part, mine in zip(parts, own, strict=False))


class _Predictions:
    """Cold predictions of all cases: surprise = log(measured / predicted), slopes, sigma, and memory."""

    def __init__(self, cases: Sequence[Case], fitted: dict[str, float]) -> None:
        self.cases = cases
        grid = Grid.stack([case.grid(fitted=fitted) for case in cases]) if cases else None
        self.step_s: Array
        self.shares: Array
        self.step_s, self.shares = slopes(grid) if grid is not None else (np.empty(0), np.empty((0, 0)))
        self.measured_s = np.array([case.step_s or np.nan for case in cases])
        self.surprise = np.log(self.measured_s / self.step_s)
        k = np.einsum("nk,kl,nl->n", self.shares, prior_covariance(), self.shares) if len(cases) else np.empty(0)
        self.sigma = COLD_SHARE * np.sqrt(k + ROW_SD**2)
        used = memory(grid) if grid is not None else None
        measured = np.array([case.peak_bytes or np.nan for case in cases])
        if used is None:
            self.memory_surprise = measured
        else:
            counted = np.where([case.peak_kind == "allocator" for case in cases], used.allocated, used.peak)
            self.memory_surprise = np.log(measured / counted)


class _Errors:
    """Per case: lists of log errors over its calibrators, of those that differ, and of (inside p10-p90)."""

    def __init__(self, num: int) -> None:
        self.all: list[list[float]] = [[] for _ in range(num)]
        self.differs: list[list[float]] = [[] for _ in range(num)]
        self.inside: list[list[bool]] = [[] for _ in range(num)]
        self.memory: list[list[float]] = [[] for _ in range(num)]
        self.regret: list[list[float]] = [[] for _ in range(num)]  # filed under the first case of the choice
        self.singleton = [False] * num


def _calibrated(p: _Predictions, calibrate: Calibrate) -> _Errors:
    errors = _Errors(len(p.cases))
    if calibrate == "none":
        for i, z in enumerate(p.surprise):
            if np.isfinite(z):
                errors.all[i].append(z)
                errors.inside[i].append(abs(z) < HALF_WIDTH * p.sigma[i])
            if np.isfinite(p.memory_surprise[i]):
                errors.memory[i].append(p.memory_surprise[i])
        _regret(p, errors, range(len(p.cases)), np.zeros(len(p.cases)))
        return errors
    for members in groups(p.cases):
        _memory_after_one(p, errors, members)
        timed = [i for i in members if np.isfinite(p.surprise[i])]
        needed = 1 if calibrate == "one" else 3
        if len(timed) <= needed:
            for i in timed:
                errors.singleton[i] = True
            continue
        shares, z, places = p.shares[timed], p.surprise[timed], np.stack([_place(p.cases[i]) for i in timed])
        versions = np.array([p.cases[i].version for i in timed])
        choices = [[k] for k in range(len(timed))] if calibrate == "one" else [_three(shares)]
        for seen in choices:
            expected, variance = updated(seen, z, shares, places, versions)
            for k, i in enumerate(timed):
                if k in seen:
                    continue
                rest = float(z[k] - expected[k])
                errors.all[i].append(rest)
                errors.inside[i].append(abs(rest) < HALF_WIDTH * np.sqrt(variance[k]))
                if any(_differs(p.cases[i], p.cases[timed[s]]) for s in seen):
                    errors.differs[i].append(rest)
            full = np.zeros(len(p.cases))
            full[timed] = expected
            _regret(p, errors, timed, full)
    return errors


KINDS_APART = 1.5  # doublings that another sharding or recompute counts as
REPEATS_APART = 0.3  # doublings that one of replicas or batch counts as: it repeats the same layers


def _place(case: Case) -> Array:
    """Where a case lies among others of its group, in doublings: see `calibrate.form_covariance`."""
    x = case.layout
    layers = np.log2([x.tp, x.pp, x.cp, x.micro_batch, case.virtual_stages])
    repeats = np.log2([x.dp, case.global_batch])
    kinds = np.array([x.zero, RECOMPUTE.index(x.recompute)])
    return np.concatenate((layers, REPEATS_APART * repeats, KINDS_APART * kinds))


def _three(shares: Array) -> list[int]:
    """The three rows that differ most: greedily the largest remaining variance (D-optimal)."""
    k = shares @ prior_covariance() @ shares.T
    chosen: list[int] = []
    left = np.diag(k).copy()
    for _ in range(3):
        left[chosen] = -1
        chosen.append(int(np.argmax(left)))
        seen = np.asarray(chosen)
        solve = np.linalg.solve(k[np.ix_(seen, seen)] + ROW_SD**2 * np.eye(len(seen)), k[seen])
        left = np.diag(k) - np.einsum("in,in->n", k[seen], solve)
    return chosen


def _differs(a: Case, b: Case) -> bool:
    x, y = a.layout, b.layout
    return (x.tp, x.pp, x.cp, x.zero, x.recompute) != (y.tp, y.pp, y.cp, y.zero, y.recompute)


def _memory_after_one(p: _Predictions, errors: _Errors, members: Sequence[int]) -> None:
    known = [i for i in members if np.isfinite(p.memory_surprise[i])]
    for i in known:
        others = [j for j in known if j != i]
        errors.memory[i].extend(p.memory_surprise[i] - p.memory_surprise[j] for j in others)


def _regret(p: _Predictions, errors: _Errors, members: Sequence[int], expected: Array) -> None:
    """Among measured layouts of one model on the same devices and batch: measured time of the one that would be chosen
    over the best measured, in percent."""
    choices: dict[tuple[object, ...], list[int]] = {}
    for i in members:
        case = p.cases[i]
        if np.isfinite(p.surprise[i]):
            same = (case.source, case.gpu_type, case.model_name, case.num_devices, case.sequence_length)
            choices.setdefault((*same, case.global_batch, case.precision), []).append(i)
    for rows in choices.values():
        times: dict[object, list[float]] = {}
        for i in rows:
            times.setdefault(_key(p.cases[i]), []).append(float(p.measured_s[i]))
        if len(times) > 1:  # repeats of one layout are no choice: it counts with its median
            chosen = min(rows, key=lambda i: p.step_s[i] * np.exp(expected[i]))
            typical = {key: float(np.median(values)) for key, values in times.items()}
            regret = typical[_key(p.cases[chosen])] / min(typical.values()) - 1
            errors.regret[rows[0]].append(100 * regret)


def _key(case: Case) -> object:
    return case.layout, case.virtual_stages


def _families(cases: Sequence[Case], skipped: Sequence[Skipped]) -> list[tuple[str, str, str]]:
    rows: list[Case | Skipped] = [*cases, *skipped]
    keys = {(x.source, x.gpu_type, x.bucket) for x in rows}
    return sorted(keys | {(source, kind, "all") for source, kind, _ in keys})


def _family(
    cases: Sequence[Case],
    skipped: Sequence[Skipped],
    p: _Predictions,
    errors: _Errors,
    key: tuple[str, str, str],
    calibrate: Calibrate,
) -> dict[str, Any]:
    source, gpu_type, bucket = key

    def mine(x: Case | Skipped) -> bool:
        return (x.source, x.gpu_type) == (source, gpu_type) and bucket in ("all", x.bucket)

    rows = [i for i, case in enumerate(cases) if mine(case)]
    reasons = Counter(x.reason for x in skipped if mine(x))
    excused = sum(n for reason, n in reasons.items() if reason.startswith(EXCUSES))
    asked = len(rows) + sum(reasons.values()) - excused
    times = [_mean_ape(errors.all[i]) for i in rows if errors.all[i]]
    pairs = [_ape(z) for i in rows for z in errors.differs[i]]
    peaks = [_mean_ape(errors.memory[i]) for i in rows if errors.memory[i]]
    inside = [hit for i in rows for hit in errors.inside[i]]
    regrets = [value for i in rows for value in errors.regret[i]]
    report = {
        "source": source,
        "gpu_type": gpu_type,
        "gpus_bucket": bucket,
        "n": len(times),
        "coverage": len(rows) / asked if asked else None,
        **_summary("", times),
        "memory_n": len(peaks),
        **_summary("memory_", peaks),
        "coverage_p10_p90": float(np.mean(inside)) if inside else None,
        "choice_regret": float(np.mean(regrets)) if regrets else None,
        "singletons": sum(errors.singleton[i] for i in rows),
        "skipped": dict(sorted(reasons.items())),
    }
    if calibrate != "none":
        report |= {"differs_n": len(pairs), **_summary("differs_", pairs)}
    return report


EXCUSES = ("missing:", "contradictory", "not a", "out of range")


def _ape(z: float) -> float:
    """Absolute error of the prediction over the measured value, in percent."""
    return 100 * abs(1 - float(np.exp(-z)))


def _mean_ape(values: Sequence[float]) -> float:
    return float(np.mean([_ape(z) for z in values]))


def _summary(prefix: str, values: Sequence[float]) -> dict[str, float | None]:
    if not len(values):
        return {f"{prefix}median_ape": None, f"{prefix}p90_ape": None}
    return {
        f"{prefix}median_ape": float(np.median(values)),
        f"{prefix}p90_ape": float(np.percentile(values, 90)),
    }
