"""`suika logs`: what a job's processes print, wherever they run."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from suika.cli.ask import MISTAKE, OUTAGE_S, ask
from suika.cli.output import JsonOption, OutputOption, emit_document, note

_POLL_S = 0.5


def logs(
    job: Annotated[str, typer.Argument(help="Name or id of a job.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only of this rank, whatever process it was.")] = None,
    tail: Annotated[int | None, typer.Option(min=0, max=10_000, help="Only the last lines of each process.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Lines as they are, without the rank.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """Show what a job printed: each process's output, followed over moves, restarts and rotation."""
    shown = "json" if json else output
    if shown in ("json", "yaml"):
        if follow:
            note("suika logs: --follow prints lines; ask again with the cursor's page for JSON")
            sys.exit(MISTAKE)
        emit_document(
            {"entries": [entry for page in _pages(job, rank, tail, False) for entry in page["entries"]]}, shown
        )
        return
    missing: set[str] = set()
    printed = False
    for page in _pages(job, rank, tail, follow):
        for entry in page["entries"]:
            _show(entry, raw or rank is not None)
            printed = True
        for node in page["missing"]:
            if node["node"] not in missing:
                missing.add(node["node"])
                note(f"suika: {node['problem']}; its part of the log is not shown")
        missing &= {node["node"] for node in page["missing"]}
    if not printed:
        note(f"suika: the processes of {job} have printed nothing (`suika describe {job}` shows its steps and loss)")


def _pages(job: str, rank: int | None, tail: int | None, follow: bool) -> Any:
    """Page after page: to the present end, or, to `follow`, until the job has ended."""
    cursor = None
    while True:
        patience_s = OUTAGE_S if follow and cursor else 0.0
        page = ask("logs", job=job, rank=rank, tail=tail, cursor=cursor, patience_s=patience_s)
        cursor = page["cursor"]
        yield page
        if not page["more"]:
            if not follow or page["ended"]:
                return
            time.sleep(_POLL_S)


def _show(entry: dict[str, Any], raw: bool) -> None:
    start = "" if raw else f"[{entry['device'] if entry['rank'] is None else entry['rank']}] "
    for line in entry["text"].splitlines():
        sys.stdout.write(f"{start}{line}\n")
    sys.stdout.flush()
