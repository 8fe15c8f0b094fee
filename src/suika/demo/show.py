"""Progress, on stderr: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from suika.control.store import Event
from suika.core.layout import Layout

LINES = 8


class Show:
    """Use as a context. `phase` and `say` tell what happens; `cluster` and `twins` show how far it is."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._began_s = time.monotonic()
        self._phase = ""
        self._lines: deque[str] = deque(maxlen=LINES)
        self._rows: Sequence[Mapping[str, Any]] = ()
        self._told = 0
        self._live = (
            Live(console=self._console, refresh_per_second=4, transient=True) if self._console.is_terminal else None
        )

    def __enter__(self) -> Show:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, what: str) -> None:
        self._phase = what
        self.say(f"-- {what}")

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._began_s:6.1f}s  {text}"
        self._lines.append(line)
        if self._live is None:
            self._console.print(Text(line), soft_wrap=True)
        else:
            self._live.update(self._picture())

    def cluster(self, rows: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> None:
        """The jobs now (as `ps` has them), and a line for each decision that is new among `events`."""
        self._rows = rows
        names = {row["id"]: row["name"] for row in rows}
        for event in events[self._told :]:
            if event.kind == "decided":
                self.say(f"   {names.get(event.job_id or '', '?')}: {event.data['action']}, {event.data['sentence']}")
            elif event.kind == "redeployed" and event.data["pause_s"] is not None:
                paused, moved = event.data["pause_s"], event.data["moved_bytes"] / 2**20
                self.say(f"   {names.get(event.job_id or '', '?')} moved {moved:.1f} MiB and paused {paused:.2f} s")
        self._told = len(events)
        if self._live is not None:
            self._live.update(self._picture())

    def twins(self, steps: Mapping[str, int]) -> None:
        self._rows = [{"name": name, "steps_done": done} for name, done in steps.items()]
        if self._live is not None:
            self._live.update(self._picture())

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False, title=self._phase, title_justify="left", title_style="bold")
        for title in ("JOB", "STATE", "LAYOUT", "DEVICES", "STEPS", "LOSS"):
            table.add_column(title)
        for row in self._rows:
            layout = str(Layout.from_dict(row["layout"])) if row.get("layout") else "-"
            steps = f"{row['steps_done']}" + (f"/{row['steps']}" if "steps" in row else "")
            loss = f"{row['loss']:.4f}" if row.get("loss") is not None else "-"
            devices = " ".join(row.get("devices", ()))
            table.add_row(
                *(Text(str(cell)) for cell in (row["name"], row.get("state", "-"), layout, devices, steps, loss))
            )
        return Group(table, *(Text(line, style="dim") for line in self._lines))
