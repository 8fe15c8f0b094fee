"""How an explanation is shown: the same for a live job and for one at an instant of a simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from suika.cli.output import Column, Format, emit, harmless
from suika.core.words import seconds


def layout_text(layout: dict[str, Any] | None) -> str:
    from suika.core.layout import Layout

    return str(Layout.from_dict(layout)) if layout else "-"


def devices_text(devices: list[str]) -> str:
    """`n0/0-3,n1/2`: runs of neighbours are folded."""
    by_node: dict[str, list[int]] = {}
    for device in devices:
        node, _, index = device.rpartition("/")
        by_node.setdefault(node, []).append(int(index))
    return ",".join(f"{node}/{_runs(sorted(indices))}" for node, indices in sorted(by_node.items())) or "-"


def _runs(indices: list[int]) -> str:
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


OPTIONS = (
    Column("DEVICES", lambda row: row["devices"]),
    Column("SHAPE", lambda row: "+".join(map(str, row["shape"]))),
    Column("LAYOUT", lambda row: layout_text(row["layout"])),
    Column("STEP", lambda row: seconds(row["step_s"])),
    Column("ENDS IN", lambda row: seconds(row["ends_in_s"])),
    Column("NOW", lambda row: "has it" if row["has"] else ""),
)
CHANGES = (Column("WITH", lambda row: row["change"]), Column("THEN", lambda row: row["then"]))


def clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def show(told: Mapping[str, Any], output: Format, at: Callable[[float], str] = clock) -> None:
    """Print an explanation as text; `at` says a time."""
    print(harmless(f"{told['name']} is {told['state']}: {told['reason']['sentence']} ({told['reason']['code']})"))
    waits = told.get("waits_for")
    if waits is not None:
        when = "never" if waits["in_s"] is None else f"in {seconds(waits['in_s'])}"
        free = f"{waits['free_now']} devices are free, it needs {waits['devices']}"
        print(f"{free}; by predicted ends as many are there {when}")
    history = (
        Column("AT", lambda event: at(event["at_s"])),
        Column("WHAT", lambda event: event["data"].get("action", event["kind"])),
        Column("LAYOUT", lambda event: layout_text(event["data"].get("layout"))),
        Column("DEVICES", lambda event: devices_text(event["data"].get("devices", []))),
        Column("WHY", why),
    )
    emit(told, told["history"], history, output)
    for title, key, columns in (("Options", "options", OPTIONS), ("What would change it", "would_change", CHANGES)):
        if told.get(key):
            print(f"\n{title}")
            emit(told, told[key], columns, output)
    if told.get("without_effect"):
        print(f"\nWithout effect: {'; '.join(told['without_effect'])}")


def why(event: Mapping[str, Any]) -> str:
    data = event["data"]
    if event["kind"] == "recovering":
        return f"{data['lost_steps']} steps lost"
    return (
        data.get("sentence") or data.get("why") or data.get("error") or f"devices {data.get('min')}..{data.get('max')}"
    )
