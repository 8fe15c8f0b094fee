"""The timeline as Chrome trace JSON, which ui.perfetto.dev opens: one track per device, one counter per job's loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suika.demo.timeline import Timeline

MICRO = 1e6


def write_trace(path: Path, timeline: Timeline, losses: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """`losses`: per job, (seconds since the first event, loss)."""
    devices = sorted({span.device for span in timeline.spans})
    nodes = sorted({device.rpartition("/")[0] for device in devices})
    process = {node: number for number, node in enumerate(nodes, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process[node], "args": {"name": f"node {node}"}} for node in nodes
    ]
    for device in devices:
        node, _, index = device.rpartition("/")
        named = {"name": f"device {device}"}
        events.append({"ph": "M", "name": "thread_name", "pid": process[node], "tid": int(index), "args": named})
    for span in timeline.spans:
        node, _, index = span.device.rpartition("/")
        events.append(
            {
                "ph": "X",
                "name": f"{span.job} {span.layout}",
                "cat": span.job,
                "pid": process[node],
                "tid": int(index),
                "ts": span.start_s * MICRO,
                "dur": (span.stop_s - span.start_s) * MICRO,
                "args": {"generation": span.generation, "layout": span.layout},
            }
        )
    for mark in timeline.marks:
        events.append({"ph": "i", "s": "g", "name": mark.text, "pid": 0, "tid": 0, "ts": mark.at_s * MICRO})
    for job, points in losses.items():
        for at_s, loss in points:
            events.append({"ph": "C", "name": f"loss {job}", "pid": 0, "ts": at_s * MICRO, "args": {"loss": loss}})
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False))
