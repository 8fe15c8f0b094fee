"""Completion times under Suika's policy and every rival: the runs behind docs/numbers/schedule.md.

`--part` names a group of runs (PARTS); each run is one trace at one load and one move cost under several policies.
Finished runs are appended to `--out` (JSON lines) and are not run again, so a long study can be stopped and taken up.
`--part tune` is the search for parameters: each policy gets at most four settings (GRID), valued on development traces
by the geometric mean of the average completion time; the winners are the policies' defaults.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from suika.core.cluster import parse_cluster_shorthand
from suika.core.errors import SpecError, require
from suika.schedule.policies import NAMES
from suika.simulate import study
from suika.simulate.predictor import Lengths
from suika.simulate.times import Models, estimated, measured
from suika.simulate.trace import read_trace

BASE = "rubick/workload-base.csv"
W64 = ("philly_w64_busiest", "helios_venus_w64_moderate", "lingjun2023_w64_busiest")
C1024 = ("lingjun2023_c1024_3d", "helios_venus_c1024_7d", "philly_c1024_7d")
ALL = tuple(NAMES)
# Every rival that was best, or best of Rubick, Sia, Arena and Pollux, in a case of the parts base, w64 and loads.
BEST = ("suika", "elasticflow", "rubick", "hesrpt", "smartfill", "arena", "sia", "srpt")

# At most four settings each, the default first.
GRID: dict[str, tuple[str, ...]] = {
    "suika": ("", "tax=3.0", "tax=1.5", "repay=0.0"),
    "srtf": ("", "charge=0.0", "charge=1.0", "charge=2.0"),
    "tiresias": ("", "first_device_s=900.0", "first_device_s=3600.0", "first_device_s=57600.0"),
    "gavel": ("", "round_s=360.0", "round_s=720.0", "round_s=3600.0"),
    "themis": ("", "round_s=1200.0", "round_s=1800.0", "filter=0.4"),
    "pollux": ("", "order=0", "power=-0.5", "order=0,power=-0.5"),
    "elasticflow": ("", "repay=2.0", "repay=4.0", "tightness=1.5"),
    "sia": ("", "power=-0.5", "power=-0.25", "power=-0.5,penalty=1.1"),
    "rubick": ("", "shortest=0", "repay=2.0", "residency=600.0"),
    "lyra": ("", "repay=1.0", "repay=4.0", "repay=0.5"),
    "arena": ("", "repay=1.0,shortest=0", "repay=1.0", "repay=1.0,depth=1"),
    "srpt": ("", "efficiency=0.25", "efficiency=0.0", "efficiency=0.0,repay=2.0"),
    "hesrpt": ("", "power=0.0,repay=2.0", "power=0.0,repay=4.0", "power=0.0"),
    "smartfill": ("", "repay=2.0", "repay=1.0", "repay=1.0,most=48"),
}


@dataclass(frozen=True)
class Case:
    trace: str
    policies: tuple[str, ...] = ALL
    move_cost: str = "260"
    load: float | None = None
    seed: int = 0
    devices: int = 64
    lengths: str = "declared"
    noise: float = 0.0
    curves: str = "measured"


LOADS = (0.5, 0.8, 1.0, 1.2)
COSTS = ("260", "30")

PARTS: dict[str, list[Case]] = {
    "base": [Case(BASE, move_cost=cost) for cost in (*COSTS, "2", "model")],
    "w64": [Case(trace, move_cost=cost) for trace in W64 for cost in COSTS],
    "loads": [Case(trace, move_cost=cost, load=load) for load in LOADS for trace in (BASE, *W64) for cost in COSTS],
    "jitter": [Case(BASE, ("suika",), cost, seed=seed) for cost in COSTS for seed in range(1, 6)],
    "seeds": [
        Case(trace, BEST, cost, load, seed)
        for seed in range(1, 5)
        for load in (None, *LOADS)
        for trace in (BASE, *W64)
        for cost in COSTS
    ],
    "robust": [
        Case(BASE, ("suika",), cost, lengths=lengths, noise=noise)
        for cost in COSTS
        for lengths, noise in (("declared", 0.07), ("noisy:0.5", 0.0), ("noisy:0.5", 0.07), ("blind", 0.0))
    ],
    "vc": [Case("philly_vc_7f04ca", BEST, cost, devices=128) for cost in COSTS],
    "c1024": [
        Case(trace, BEST, "30", load, seed, devices=1024, curves="estimated")
        for seed in (0, 1)
        for load in (0.8, 1.2)
        for trace in C1024
    ],
    "helios-7d": [Case("helios_venus_c1024_7d", ("suika",), "30", devices=1024, curves="estimated")],
    "tune": [
        Case(trace, tuple(f"{name}:{setting}" for name, settings in GRID.items() for setting in settings), cost)
        for trace, cost in ((BASE, "260"), (BASE, "30"), ("lingjun2023_w64_busiest", "260"))
    ],
}


def run(
    data: Annotated[Path, typer.Option(help="Folder with rubick/ and traces/.")],
    part: Annotated[str, typer.Option(help=f"Parts, comma-separated: {', '.join(PARTS)}.")] = "base",
    out: Annotated[Path | None, typer.Option(help="JSON lines; finished runs are kept and not repeated.")] = None,
    policies: Annotated[str, typer.Option(help="Only these policies.")] = "",
) -> dict[str, Any]:
    """Simulate every case of some parts, one policy at a time."""
    only = set(filter(None, policies.split(",")))
    done = _finished(out)
    rows: list[dict[str, Any]] = []
    for name in part.split(","):
        if name not in PARTS:
            raise SpecError("part", name, "unknown part", f"known: {', '.join(PARTS)}")
        for case in PARTS[name]:
            for policy in case.policies:
                if only and policy.partition(":")[0] not in only:
                    continue
                key = json.dumps([case.trace, case.move_cost, case.load, case.seed, case.devices, policy,
                                  case.lengths, case.noise, case.curves])  # fmt: skip
                if key not in done:
                    done[key] = {"key": key, **_one(data, case, policy)}
                    if out is not None:
                        with out.open("a") as lines:
                            lines.write(json.dumps(done[key]) + "\n")
                rows.append(done[key])
    return {"runs": rows, "tuned": list(_tuned(rows))} if "tune" in part else {"runs": rows}


def _finished(out: Path | None) -> dict[str, dict[str, Any]]:
    if out is None or not out.is_file():
        return {}
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    return {row["key"]: row for row in rows}


def _one(data: Path, case: Case, policy: str) -> dict[str, Any]:
    path = data / case.trace if "/" in case.trace else data / "traces" / f"{case.trace}.csv.gz"
    require(path.is_file(), "data", str(path), "is not there")
    cluster = parse_cluster_shorthand(f"{case.devices // 8}x8:A800")
    models: Models = (
        measured(data / "rubick" / "iteration_times.csv") if case.curves == "measured" else estimated(cluster)
    )
    asked = study.Study(
        read_trace(path),
        cluster,
        models,
        (policy,),
        move_cost=case.move_cost,
        lengths=Lengths.parse(case.lengths),
        noise=case.noise,
        seeds=(case.seed,),
        load=case.load,
    )
    document, _ = study.run(asked)
    (row,) = document["policies"]
    row.pop("ci95")
    return {
        "trace": case.trace,
        "load": document["load"],
        "asked_load": case.load,
        "move_cost": case.move_cost,
        "seed": case.seed,
        "devices": case.devices,
        "lengths": case.lengths,
        "noise": case.noise,
        "lower_bound_avg_jct_s": document["lower_bound_avg_jct_s"],
        **row,
    }


def _tuned(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The best setting of each policy, and by how much it beats the first."""
    for name, settings in GRID.items():
        scores = {
            setting: float(
                np.exp(np.mean([np.log(r["avg_jct_s"]) for r in rows if r["policy"] == f"{name}:{setting}"]))
            )
            for setting in settings
            if any(row["policy"] == f"{name}:{setting}" for row in rows)
        }
        if scores:
            best = min(scores, key=lambda setting: scores[setting])
            yield {"policy": name, "best": best, "gain": scores[settings[0]] / scores[best], "scores": scores}
