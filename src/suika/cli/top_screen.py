"""The screen of `suika top`: a summary, jobs, nodes and what was decided last. What is lost is said, never guessed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer, Static

from suika.cli.ask import reach
from suika.cli.explained import devices_text, layout_text
from suika.control.client import ControllerFaultError, NoControllerError
from suika.core.errors import SpecError
from suika.core.words import seconds, size

SHOWN_MOVES = 50
_EVENTS_AT_ONCE = 1000
_TOLD = ("decided", "redeployed", "move-failed", "recovering", "device-lost", "node-lost", "straggler")
_MARKS = {"used": ("#", "green"), "free": (".", "dim"), "releasing": ("~", "yellow"), "down": ("x", "red")}
Reach = Callable[..., Any]


@dataclass(frozen=True)
class Look:
    """One answer of the cluster."""

    jobs: Sequence[Mapping[str, Any]]
    nodes: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]


class Top(App[None]):
    """`reach` asks the cluster; it runs in a thread, so that a slow answer does not freeze the keys."""

    CSS = """
    #summary { height: 2; padding: 0 1; }
    #jobs { height: 2fr; border-top: solid $primary; }
    #lower { height: 1fr; }
    #nodes { width: 1fr; border-top: solid $primary; }
    #moves { width: 2fr; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("r", "look", "Look now"),
        Binding("tab", "app.focus_next", "Next table"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, every_s: float, reach: Reach = reach) -> None:
        super().__init__()
        self._every_s, self._reach = every_s, reach
        self._after: int | None = None  # the newest event that was seen; None: none yet
        self._told: deque[Mapping[str, Any]] = deque(maxlen=SHOWN_MOVES)
        self._names: dict[str, str] = {}
        self.look: Look | None = None  # the latest
        self.trouble: str | None = None  # why there is no newer one

    def compose(self) -> ComposeResult:
        yield Static(id="summary")
        yield DataTable(id="jobs", cursor_type="row")
        with Horizontal(id="lower"):
            yield DataTable(id="nodes", cursor_type="row")
            yield DataTable(id="moves", cursor_type="row")
        yield Footer()

    def on_mount(self) -> None:
        self._table("jobs").add_columns("JOB", "STATE", "LAYOUT", "DEVICES", "PROGRESS", "STEP", "LEFT", "WHY")
        self._table("nodes").add_columns("NODE", "TYPE", "DEVICES", "STATE")
        self._table("moves").add_columns("AT", "JOB", "WHAT", "DETAIL")
        self.action_look()
        self.set_interval(self._every_s, self.action_look)

    def _table(self, name: str) -> DataTable[Any]:
        return self.query_one(f"#{name}", DataTable)

    @work(thread=True, exclusive=True)
    def action_look(self) -> None:
        try:
            look = Look(self._reach("jobs"), self._reach("nodes"), self._news())
        except (NoControllerError, ControllerFaultError, SpecError, OSError) as error:
            self.call_from_thread(self._show_trouble, str(error))
        else:
            self.call_from_thread(self._show, look)

    def _news(self) -> list[Mapping[str, Any]]:
        """Events since the last look; at the first look those that are there now, page after page."""
        found: list[Mapping[str, Any]] = []
        after = self._after or 0
        while page := self._reach("events", after=after, limit=_EVENTS_AT_ONCE):
            found += [event for event in page if event["kind"] in _TOLD]
            after = page[-1]["seq"]
        self._after = after
        return found[-SHOWN_MOVES:]

    # -- showing ------------------------------------------------------------------------------------------------------

    def _show_trouble(self, trouble: str) -> None:
        """What was seen last stays, and it is said that it is old."""
        self.trouble = trouble
        self._show_summary()

    def _show(self, look: Look) -> None:
        self.look, self.trouble = look, None
        self._names |= {row["id"]: row["name"] for row in look.jobs}
        self._told.extend(look.events)
        self._show_summary()
        _fill(self._table("jobs"), (_job_cells(row) for row in look.jobs))
        _fill(self._table("nodes"), (_node_cells(row) for row in look.nodes))
        _fill(self._table("moves"), (_event_cells(event, self._names) for event in reversed(self._told)))

    def _show_summary(self) -> None:
        text = Text()
        if self.look is not None:
            devices = Counter(device["state"] for node in self.look.nodes for device in node["devices"])
            jobs = Counter(row["state"] for row in self.look.jobs)
            text.append(f"{sum(devices.values())} devices: " + _counts(devices))
            text.append(f"    {len(self.look.jobs)} jobs: " + _counts(jobs))
        text.append("\n")
        if self.trouble is not None:
            text.append(f"NO CONNECTION, what you see is old: {self.trouble}", style="bold red")
        self.query_one("#summary", Static).update(text)


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(found.items())) or "none"


def _fill(table: DataTable[Any], rows: Iterable[Sequence[Any]]) -> None:
    """Anew, but where the reader was."""
    row, scroll = table.cursor_row, table.scroll_y
    table.clear()
    for cells in rows:
        table.add_row(*cells)
    table.move_cursor(row=min(row, table.row_count - 1), scroll=False)
    table.scroll_to(y=scroll, animate=False)


def _job_cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    left = row["steps"] - row["steps_done"]
    return (
        Text(row["name"]),
        Text(row["state"], style=_state_style(row["state"])),
        layout_text(row["layout"]),
        devices_text(row["devices"]),
        f"{row['steps_done']}/{row['steps']}",
        seconds(row["step_s"]),
        seconds(left * row["step_s"] if row["step_s"] is not None else None),
        Text(row["reason"]["sentence"]),  # text, never markup: a name is shown as it is
    )


def _state_style(state: str) -> str:
    return {"running": "green", "queued": "yellow", "redeploying": "cyan", "recovering": "red"}.get(state, "")


def _node_cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    devices = Text()
    for device in row["devices"]:
        mark, style = _MARKS[device["state"]]
        devices.append("!" if device.get("slow") else mark, "bold red" if device.get("slow") else style)
    slow = sum(bool(device.get("slow")) for device in row["devices"])
    state = "draining" if row["draining"] else "ready"
    return (Text(row["name"]), row["type"], devices, state + (f", {slow} slow" if slow else ""))


def _event_cells(event: Mapping[str, Any], names: Mapping[str, str]) -> tuple[Any, ...]:
    data, job_id = event["data"], event["job_id"]
    what = data.get("action", event["kind"])
    at = time.strftime("%H:%M:%S", time.localtime(event["at_s"]))
    return (at, Text(names.get(job_id, job_id or "-")), Text(str(what)), Text(_detail(event["kind"], data)))


def _detail(kind: str, data: Mapping[str, Any]) -> str:
    if kind == "redeployed":
        layouts = f"{layout_text(data['old'])} -> {layout_text(data['new'])}"
        return f"{layouts}: {size(data['moved_bytes'])} in {seconds(data['total_s'])}, pause {seconds(data['pause_s'])}"
    if kind == "recovering":
        return f"{data['lost_steps']} steps lost"
    return str(data.get("sentence") or data.get("error") or data.get("device") or data.get("node") or "")
