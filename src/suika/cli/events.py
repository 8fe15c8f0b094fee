"""`suika events`: what happened, a page at a time."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from suika.cli.ask import MISTAKE, OUTAGE_S, ask
from suika.cli.moments import moment
from suika.cli.output import Column, JsonOption, OutputOption, emit, harmless, note

_PAGE = 1000  # the most that a controller gives at once
_POLL_S = 0.5

COLUMNS = [
    Column("SEQ", lambda row: row["seq"]),
    Column("AT", lambda row: time.strftime("%H:%M:%S", time.localtime(row["at_s"]))),
    Column("WHAT", lambda row: row["kind"]),
    Column("JOB", lambda row: row["job_id"]),
    Column("DETAIL", lambda row: _detail(row["data"])),
]


def events(
    job: Annotated[str | None, typer.Option(help="Only of this job.")] = None,
    after: Annotated[int | None, typer.Option(min=0, help="The first events after this number, not the last.")] = None,
    since: Annotated[str | None, typer.Option(help="Not older than 2026-01-31[T12:00], or 12h, 7d.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000_000, help="At most so many.")] = 200,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on showing what happens.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Show what happened lately: the last events, or the first after a number, oldest first."""
    shown = "json" if json else output
    if follow and shown in ("json", "yaml"):
        note("suika events: --follow prints a table; ask again with --after for JSON")
        sys.exit(MISTAKE)
    asked = {"job": job, "since": moment(since, "since")}
    rows, more = _last(asked, limit) if after is None else _first(asked, after, limit)
    emit({"events": rows, "more": more}, rows, COLUMNS, shown)
    if more and not (follow and after is not None):
        rest = "older ones are not shown" if after is None else f"go on with --after {rows[-1]['seq']}"
        note(f"suika: {len(rows)} events, {rest}; --limit shows more")
    after = rows[-1]["seq"] if rows else after or 0
    while follow:
        rows = ask("events", patience_s=OUTAGE_S, after=after, **asked)
        for row in rows:
            print("  ".join(harmless(str(column.text(row))) for column in COLUMNS), flush=True)
        if rows:
            after = rows[-1]["seq"]
        else:
            time.sleep(_POLL_S)


def _last(asked: dict[str, Any], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The newest `limit` events, oldest first, and whether there are older ones."""
    pages: list[list[dict[str, Any]]] = []
    left, before = limit + 1, None
    while left > 0:
        page = ask("events", newest=True, before=before, limit=min(left, _PAGE), **asked)
        if not page:
            break
        pages.append(page)
        left, before = left - len(page), page[0]["seq"]
    rows = [row for page in reversed(pages) for row in page]
    return rows[-limit:], len(rows) > limit


def _first(asked: dict[str, Any], after: int, limit: int) -> tuple[list[dict[str, Any]], bool]:
    """The first `limit` events after number `after`, and whether there are more."""
    rows: list[dict[str, Any]] = []
    while len(rows) <= limit:
        page = ask("events", after=after, limit=min(limit + 1 - len(rows), _PAGE), **asked)
        if not page:
            break
        rows += page
        after = page[-1]["seq"]
    return rows[:limit], len(rows) > limit


def _detail(data: dict[str, Any]) -> str:
    """The parts of an event that say something in a line."""
    shown = {key: value for key, value in data.items() if isinstance(value, (str, int, float)) and key != "body"}
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown.items()
    )
