"""`suika quota`: how many devices a tenant's jobs may hold together."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from suika.cli.ask import MISTAKE, ask
from suika.cli.output import Column, JsonOption, OutputOption, emit, note

COLUMNS = [Column("TENANT", lambda row: row["tenant"]), Column("DEVICES", lambda row: row["devices"])]


def quota(
    tenant: Annotated[str | None, typer.Argument(help="Whose quota to set.")] = None,
    devices: Annotated[int | None, typer.Argument(min=0, help="Devices, for all its jobs together.")] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="Lift the limit.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """List quotas, or set one. A tenant without an entry has no limit."""
    if tenant is not None:
        if (devices is None) != unlimited:
            note("suika quota: give the number of devices, or --unlimited")
            sys.exit(MISTAKE)
        ask("set_quota", tenant=tenant, devices=devices)
    rows = [{"tenant": name, "devices": number} for name, number in sorted(ask("quotas").items())]
    emit({"quotas": rows}, rows, COLUMNS, "json" if json else output)
