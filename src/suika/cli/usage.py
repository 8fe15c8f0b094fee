"""`suika usage`: device time, waiting and moves by tenant and job."""

from __future__ import annotations

import csv
import sys
import time
from typing import Annotated, Any, Literal, cast

import typer

from suika.cli.ask import ask
from suika.cli.moments import moment
from suika.cli.output import Column, Format, JsonOption, emit, note, seconds, size

UsageFormat = Literal["table", "wide", "json", "yaml", "csv"]

TENANT_COLUMNS = [
    Column("TENANT", lambda row: row["tenant"]),
    Column("JOBS", lambda row: row["jobs"]),
    Column("DEVICE HOURS", lambda row: f"{row['device_s'] / 3600:.2f}"),
    Column("BY TYPE", lambda row: "  ".join(f"{t} {s / 3600:.2f}" for t, s in row["device_s_by_type"].items()) or "-"),
    Column("WAITED", lambda row: seconds(row["waiting_s"])),
    Column("MOVES", lambda row: row["moves"]),
    Column("FAILED", lambda row: row["failed_moves"], wide=True),
    Column("MOVED", lambda row: size(row["moved_bytes"]), wide=True),
]
JOB_COLUMNS = [
    Column("TENANT", lambda row: row["tenant"]),
    Column("JOB", lambda row: row["name"]),
    Column("TYPE", lambda row: row["device_type"]),
    Column("DEVICE HOURS", lambda row: f"{row['device_s'] / 3600:.2f}"),
    Column("WAITED", lambda row: seconds(row["waiting_s"])),
    Column("MOVES", lambda row: row["moves"]),
    Column("FAILED", lambda row: row["failed_moves"], wide=True),
    Column("MOVED", lambda row: size(row["moved_bytes"]), wide=True),
    Column("ID", lambda row: row["job"], wide=True),
]


def usage(
    since: Annotated[str | None, typer.Option(help="2026-01-31[T12:00], or as long ago as 12h, 7d.")] = None,
    until: Annotated[str | None, typer.Option(help="The same; by default now.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only of this tenant.")] = None,
    by_job: Annotated[bool, typer.Option("--by-job", help="A row per job and device type.")] = False,
    output: Annotated[UsageFormat, typer.Option("-o", "--output", help="table, wide, json, yaml or csv.")] = "table",
    json: JsonOption = False,
) -> None:
    """What tenants have used: device time by type, waiting, moves. CSV has a row per job and device type."""
    found = ask("usage", since=moment(since, "usage.since"), until=moment(until, "usage.until"), tenant=tenant)
    if output == "csv" and not json:
        _emit_csv(found["jobs"])
        return
    rows, columns = (found["jobs"], JOB_COLUMNS) if by_job else (found["tenants"], TENANT_COLUMNS)
    emit(found, rows, columns, "json" if json else cast(Format, output))
    if not json and output in ("table", "wide"):
        note(f"from {_shown(found['since_s'])} to {_shown(found['until_s'])}")


def _shown(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _emit_csv(rows: list[dict[str, Any]]) -> None:
    names = ["tenant", "job", "name", "device_type", "device_s", "waiting_s", "moves", "failed_moves", "moved_bytes"]
    writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
