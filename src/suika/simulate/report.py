"""One self-contained HTML page of a study: table, completion-time CDFs, utilisation, and per policy a Gantt chart with
its moves in it, and the list of them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment

from suika.simulate.study import Run

WIDTH, HEIGHT = 760.0, 260.0
COLOURS = ("#1f6fb4", "#d1632a", "#2f8f4e", "#8a4fb0", "#b03a48", "#7a6a3a", "#3a8f96", "#606060")
GANTT_JOBS = 400  # the largest by device time: more cannot be told apart
LISTED_MOVES = 500  # the first ones of each policy
COLUMNS = (
    ("policy", "policy"),
    ("avg_jct_s", "average (s)"),
    ("p50_jct_s", "p50"),
    ("p95_jct_s", "p95"),
    ("p99_jct_s", "p99"),
    ("max_jct_s", "max"),
    ("makespan_s", "makespan"),
    ("avg_slowdown", "slowdown"),
    ("worst_ftf", "worst fairness"),
    ("moves_per_job", "moves / job"),
    ("lost_device_s", "lost device-s"),
    ("decision_ms_p50", "decision p50 (ms)"),
    ("decision_ms_p99", "p99"),
)


def page(document: dict[str, Any], runs: Sequence[Run]) -> str:
    """The page as HTML text. Names from traces are escaped by the template."""
    first = [run for run in runs if run.seed == runs[0].seed]
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("suika.simulate").joinpath("report.html").read_text())
    return template.render(
        document=document,
        columns=COLUMNS,
        width=WIDTH,
        height=HEIGHT,
        cdf=_cdf(first),
        use=_use(first),
        gantts=[{"policy": run.policy, **_gantt(run), **_moves(run)} for run in first],
        legend=[{"policy": run.policy, "colour": COLOURS[i % len(COLOURS)]} for i, run in enumerate(first)],
    )


def _cdf(runs: Sequence[Run]) -> dict[str, Any]:
    """Share of jobs done within a time, log scale."""
    all_s = [np.sort([record.jct_s for record in run.outcome.records]) for run in runs]
    low = np.log10(max(min(float(jct_s[0]) for jct_s in all_s), 1.0))
    high = np.log10(max(max(float(jct_s[-1]) for jct_s in all_s), 10.0 ** (low + 1)))
    lines = []
    for i, jct_s in enumerate(all_s):
        share = np.arange(1, len(jct_s) + 1) / len(jct_s)
        x = (np.log10(np.maximum(jct_s, 1.0)) - low) / (high - low) * WIDTH
        lines.append(_line(x, HEIGHT * (1 - share), i))
    ticks = [
        (float((power - low) / (high - low) * WIDTH), f"{10**power:g} s") for power in range(int(low), int(high) + 1)
    ]
    return {"lines": lines, "ticks": [tick for tick in ticks if tick[0] >= 0]}


def _use(runs: Sequence[Run]) -> dict[str, Any]:
    """Devices held over time, as means over equal parts of the longest makespan."""
    end_s = max(record.end_s or 0.0 for run in runs for record in run.outcome.records)
    edges = np.linspace(0.0, end_s, 301)
    lines = []
    for i, run in enumerate(runs):
        at_s, held = (np.array(column, dtype=float) for column in zip(*run.outcome.busy, strict=True))
        area = np.concatenate([[0.0], np.cumsum(held[:-1] * np.diff(at_s))])
        mean = np.diff(np.interp(edges, at_s, area)) / np.diff(edges)
        share = mean / run.world.cluster.num_devices
        lines.append(_line((edges[:-1] + edges[1:]) / 2 / end_s * WIDTH, HEIGHT * (1 - share), i))
    return {"lines": lines, "ticks": [(WIDTH * k / 4, f"{end_s * k / 4 / 3600:.1f} h") for k in range(5)]}


def _line(x: np.ndarray, y: np.ndarray, number: int) -> dict[str, str]:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return {"points": points, "colour": COLOURS[number % len(COLOURS)]}


def _gantt(run: Run) -> dict[str, Any]:
    """A bar per time that a job holds a number of devices, and what of it moves took; jobs from top to bottom by
    submission. A stop is a mark without a length."""
    records = sorted(run.outcome.records, key=lambda r: -r.device_s)[:GANTT_JOBS]
    records.sort(key=lambda r: (r.job.submit_s, r.job.id))
    end_s = max(record.end_s or 0.0 for record in records)
    high = HEIGHT * 2 / max(len(records), 1)
    most = max((num for record in records for _, _, num in record.spans), default=1)

    def box(row: int, start_s: float, stop_s: float, title: str) -> dict[str, Any]:
        return {
            "x": round(start_s / end_s * WIDTH, 2),
            "w": round(max((stop_s - start_s) / end_s * WIDTH, 0.2), 2),
            "y": round(row * high, 2),
            "h": round(max(high * 0.9, 0.4), 2),
            "title": title,
        }

    bars, moves = [], []
    for row, record in enumerate(records):
        name = f"{record.job.id} ({record.job.model})"
        for start_s, stop_s, num in record.spans:
            if stop_s > start_s:
                title = f"{name}: {num} devices, {start_s:.0f}-{stop_s:.0f} s"
                bars.append(box(row, start_s, stop_s, title) | {"shade": round(0.25 + 0.75 * num / most, 3)})
        for change in record.changes:
            title = f"{name}: {change.why}, {change.old} to {change.new} devices at {change.at_s:.0f} s"
            moves.append(box(row, change.begin_s, change.until_s, title))
    return {"bars": bars, "moves": moves}


def _moves(run: Run) -> dict[str, Any]:
    """The first changes of jobs that had run, by time; and how many there are."""
    found = sorted(
        ((change.at_s, record.job.id, change) for record in run.outcome.records for change in record.changes),
        key=lambda entry: entry[:2],
    )
    listed = [
        {
            "at": f"{at_s:.0f}",
            "job": job_id,
            "old": change.old,
            "new": change.new,
            "pause": f"{change.until_s - change.begin_s:.1f}",
            "why": change.why.value,
        }
        for at_s, job_id, change in found[:LISTED_MOVES]
    ]
    return {"listed": listed, "num_moves": len(found)}
