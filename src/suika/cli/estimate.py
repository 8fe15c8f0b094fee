"""`suika estimate CASES.csv`: predict measured cases and report the errors, family by family."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal

import typer

from suika.cli.output import Column, Format, JsonOption, OutputOption, emit, note


def estimate(
    cases: Annotated[Path, typer.Argument(help="CSV file (plain or .gz) of measured runs.")],
    calibrate: Annotated[
        Literal["none", "one", "three"],
        typer.Option(help="Calibrate each group of like runs on none, one or three of its rows."),
    ] = "none",
    leave_out: Annotated[
        str | None, typer.Option(help="Refit without a family: SOURCE, SOURCE/GPU_TYPE or SOURCE/GPU_TYPE/BUCKET.")
    ] = None,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Predict measured cases and report the errors per family (source x device type x size)."""
    from suika.estimate.cases import parse_cases
    from suika.estimate.evaluate import evaluate
    from suika.estimate.table import read_rows

    found, skipped = parse_cases(read_rows(cases))
    report = evaluate(found, skipped, calibrate, leave_out)
    columns = [
        Column("SOURCE", itemgetter("source")),
        Column("TYPE", itemgetter("gpu_type")),
        Column("GPUS", itemgetter("gpus_bucket")),
        Column("N", itemgetter("n")),
        Column("MEDIAN %", itemgetter("median_ape")),
        Column("P90 %", itemgetter("p90_ape")),
        Column("DIFFERS %", lambda row: row.get("differs_median_ape")),
        Column("P90 %", lambda row: row.get("differs_p90_ape")),
        Column("MEMORY %", itemgetter("memory_median_ape")),
        Column("P10-P90", itemgetter("coverage_p10_p90")),
        Column("REGRET %", itemgetter("choice_regret")),
        Column("SKIPPED", lambda row: sum(row["skipped"].values()) or None),
    ]
    output_as: Format = "json" if json else output
    emit(report, report["families"], columns, output_as)
    if output_as == "table":
        for reason, rows in _reasons(skipped).items():
            lines = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            note(f"skipped {len(rows)} rows: {reason} (lines {lines})")


def _reasons(skipped: list) -> dict[str, list[int]]:  # type: ignore[type-arg]
    found: dict[str, list[int]] = {}
    for row in skipped:
        found.setdefault(row.reason, []).append(row.row)
    return found
