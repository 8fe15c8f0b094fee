"""`suika bench estimate`: errors of the estimator family by family, its speed, and the live check."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from suika.core.cluster import parse_cluster_shorthand
from suika.core.errors import require
from suika.core.presets import preset
from suika.core.snapshot import ScalingCurve
from suika.estimate.cases import parse_cases
from suika.estimate.evaluate import evaluate, leave_one_family_out
from suika.estimate.predict import estimate_many, setting
from suika.estimate.table import read_rows
from suika.plan.curves import scaling_curve
from suika.plan.layouts import BUILT_IN, MEGATRON, Space, layout_columns

REPEATS = 20


def run(
    cases: Annotated[Path | None, typer.Option(help="Measured cases (CSV, plain or gzipped).")] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Sample one layout of a real job here, predict the others.")
    ] = False,
    only_speed: Annotated[bool, typer.Option("--speed", help="Only how long prices and curves take.")] = False,
    constants: Annotated[
        bool, typer.Option("--constants", help="Measure the constants of CPU devices: the curve `cpu`.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the live check.")] = 1,
    shape: Annotated[str, typer.Option(help="Model and batch of the live check: first or other.")] = "first",
) -> dict[str, Any]:
    """Errors per family (cold with the family left out, one and three measured rows), speed, and the live check."""
    if live:
        from suika.bench.estimate_live import live as check

        return check(rounds=rounds, shape=shape)
    if constants:
        from suika.bench.estimate_cpu import constants as measure

        return measure()
    if only_speed:
        return {"speed": speed()}
    require(cases is not None, "cases", None, "is missing", "give --cases FILE, --speed or --live")
    assert cases is not None
    found, skipped = parse_cases(read_rows(cases))
    tables = {
        "cold_left_out": leave_one_family_out(found, skipped),
        "cold": evaluate(found, skipped, "none"),
        "one": evaluate(found, skipped, "one"),
        "three": evaluate(found, skipped, "three"),
    }
    rows = [{"table": name, **_short(row)} for name, table in tables.items() for row in table["families"] if row["n"]]
    return {"families": rows, "speed": speed()}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    left_out = ("skipped", "memory_n", "singletons", "coverage")
    return {key: value for key, value in row.items() if key not in left_out}


def speed() -> dict[str, float]:
    """Milliseconds: all layouts of one model at one device count, and a curve from 1 to 1,024 devices."""
    model = preset("llama2-7b")
    cluster = parse_cluster_shorthand("128x8:H100")
    batch, length = 1024, 4096
    s = setting(model, "H100", global_batch=batch, sequence_length=length)

    def price_all(space: Space) -> int:
        columns = layout_columns(model, [64], global_batch=batch, sequence_length=length, space=space)
        estimate_many(s, columns)
        return len(columns)

    def curve(counts: range | None) -> ScalingCurve:
        return scaling_curve(model, cluster, global_batch=batch, sequence_length=length, counts=counts)

    return {
        "layouts_megatron": price_all(MEGATRON),
        "price_megatron_ms": _best_ms(lambda: price_all(MEGATRON)),
        "layouts_built_in": price_all(BUILT_IN),
        "price_built_in_ms": _best_ms(lambda: price_all(BUILT_IN)),
        "curve_1024_ms": _best_ms(lambda: curve(None)),
        "curve_1024_every_count_ms": _best_ms(lambda: curve(range(1, 1025))),
    }


def _best_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        times.append(1e3 * (time.process_time() - started))
    return min(times)
