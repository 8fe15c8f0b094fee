"""The report: families, calibration, regret; and the figures that the shipped factors must keep on the real table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from suika.core.errors import SpecError
from suika.estimate.cases import Case, Skipped, parse_cases
from suika.estimate.evaluate import evaluate
from suika.estimate.fit import fit
from suika.estimate.table import read_rows

from .test_cases import GOOD

# (source, type, bucket): cold median and p90 with the shipped factors, in percent, with a little room.
COLD = {
    ("vTrain", "A100", ">8"): (5, 12),
    ("vTrain", "A100", "<=8"): (8, 22),
    ("llm-foundry", "A100-SXM4-40GB", "all"): (5.5, 12),
    ("llm-foundry", "H100-SXM5-80GB", "all"): (7.5, 15),
    ("NeMo-docs", "H100-SXM5-80GB", "all"): (5.5, 12.5),
    ("Megatron-Bridge", "H100-SXM5-80GB", "all"): (4.5, 7),
    ("Megatron-Bridge", "GB200", "all"): (9, 16),
    ("Megatron-Bridge", "GB300", "all"): (12, 20),
    ("SimuMax-B200", "B200-SXM", "all"): (13, 17),
}


@pytest.fixture(scope="module")
def table(shared_data: Path) -> tuple[list[Case], list[Skipped]]:
    return parse_cases(read_rows(shared_data / "throughput" / "measured_dev.csv.gz"))


def families(report: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(f["source"], f["gpu_type"], f["gpus_bucket"]): f for f in report["families"]}


def test_cold_figures(table: tuple[list[Case], list[Skipped]]) -> None:
    found = families(evaluate(*table))
    for key, (median, p90) in COLD.items():
        assert found[key]["median_ape"] <= median, key
        assert found[key]["p90_ape"] <= p90, key
    for family in found.values():
        assert family["coverage"] is None or family["coverage"] >= 0.95


def test_one_measured_row_helps(table: tuple[list[Case], list[Skipped]]) -> None:
    cold, warm = families(evaluate(*table)), families(evaluate(*table, calibrate="one"))
    better = [warm[k]["median_ape"] < cold[k]["median_ape"] for k in COLD if warm[k]["n"] > 5]
    assert sum(better) >= 6
    for key in COLD:
        assert {"differs_median_ape", "differs_p90_ape", "differs_n", "singletons"} <= set(warm[key])


def test_leaving_a_family_out_refits_without_it(table: tuple[list[Case], list[Skipped]]) -> None:
    report = evaluate(*table, leave_out="Megatron-Bridge/H100-SXM5-80GB")
    family = families(report)["Megatron-Bridge", "H100-SXM5-80GB", "all"]
    assert family["median_ape"] <= 6
    with pytest.raises(SpecError, match="names no family"):
        evaluate(*table, leave_out="nobody")


def scaled(factor: float, num: int = 40) -> list[Case]:
    """Cases whose measured time is the prediction times `factor`."""
    rows = [
        {**GOOD, "tp": str(tp), "dp": str(4 // tp), "gbs": str(32 * k), "iter_time_s": "1000"}
        for tp in (1, 2, 4)
        for k in range(1, num // 3)
    ]
    cases, skipped = parse_cases(rows)
    assert not skipped
    from suika.estimate.grid import Grid
    from suika.estimate.step import price

    times = price(Grid.stack([case.grid(fitted={}) for case in cases])).step_s
    rows = [{**row, "iter_time_s": str(factor * t)} for row, t in zip(rows, times, strict=True)]
    return parse_cases(rows)[0]


@pytest.mark.parametrize("family", ["", "/", "no-such-source"])
def test_a_family_that_is_none_is_named(family: str, table: tuple[list[Case], list[Skipped]]) -> None:
    with pytest.raises(SpecError, match="leave_out"):
        evaluate(*table, leave_out=family)


def test_a_perfect_table_has_no_error_and_a_scaled_one_is_learnt_from_one_row() -> None:
    exact = families(evaluate(scaled(1.0), [], leave_out=None))["lab", "A100", "all"]
    slow = scaled(1.15)
    cold = families(evaluate(slow, []))["lab", "A100", "all"]
    warm = families(evaluate(slow, [], "one"))["lab", "A100", "all"]
    assert exact["median_ape"] < 4  # the shipped factors are not zero
    assert cold["median_ape"] > 9
    assert warm["median_ape"] < 0.4 * cold["median_ape"]
    assert exact["choice_regret"] == pytest.approx(0, abs=2)


def test_repeats_of_a_layout_are_no_choice() -> None:
    rows = [{**GOOD, "iter_time_s": t} for t in ("1.0", "1.4")]
    family = families(evaluate(parse_cases(rows)[0], []))["lab", "A100", "all"]
    assert family["choice_regret"] is None


def test_the_fit_finds_a_factor_and_leaves_the_rest() -> None:
    """All families agree that a class is slower: the factor moves towards it; on exact data nothing moves."""
    assert all(abs(value) < 0.01 for value in fit(scaled(1.0)).values())
    moved = fit([*scaled(1.2)])
    assert moved["gemm/ampere"] > 0.003
    assert np.isfinite(list(moved.values())).all()
