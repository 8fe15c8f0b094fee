"""`suika quota`: what a tenant's jobs are guaranteed, and the most that they may hold together."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from suika.cli.ask import MISTAKE, ask
from suika.cli.output import Column, JsonOption, OutputOption, emit, note


def _sure(row: Mapping[str, Any]) -> str:
    return f"{row['guarantee_nodes']} nodes" if row["guarantee_nodes"] else str(row["guarantee"])


COLUMNS = [
    Column("TENANT", lambda row: row["tenant"]),
    Column("GUARANTEED", _sure),
    Column("MAX", lambda row: row["max"]),
    Column("HOLDS", lambda row: row["held"]),
]


def quota(
    tenant: Annotated[str | None, typer.Argument(help="Whose quota to set.")] = None,
    devices: Annotated[int | None, typer.Argument(min=0, help="The most devices for all its jobs together.")] = None,
    guarantee: Annotated[int | None, typer.Option(min=0, help="Devices that are its own when it asks.")] = None,
    guarantee_nodes: Annotated[int | None, typer.Option(min=0, help="Whole nodes that are.")] = None,
    unlimited: Annotated[bool, typer.Option("--unlimited", help="Lift the maximum.")] = False,
    output: OutputOption = "table",
    json: JsonOption = False,
) -> None:
    """List quotas, or set one's numbers. Others may borrow what a tenant does not use; it comes back when it asks."""
    if tenant is not None:
        said = devices is not None or unlimited or guarantee is not None or guarantee_nodes is not None
        if not said or (devices is not None and unlimited):
            note("suika quota: give the number of devices, --unlimited, --guarantee or --guarantee-nodes")
            sys.exit(MISTAKE)
        ask("set_quota", tenant=tenant, quota=_changed(tenant, devices, guarantee, guarantee_nodes, unlimited))
    held = Counter[str]()
    for job in ask("jobs"):
        held[job["tenant"]] += len(job["devices"])
    rows = [{"tenant": name, **numbers, "held": held[name]} for name, numbers in sorted(ask("quotas").items())]
    emit({"quotas": rows}, rows, COLUMNS, "json" if json else output)


def _changed(
    tenant: str, devices: int | None, guarantee: int | None, guarantee_nodes: int | None, unlimited: bool
) -> dict[str, int | None]:
    """The tenant's quota with what was said; one kind of guarantee takes the place of the other."""
    before = ask("quotas").get(tenant, {"guarantee": 0, "guarantee_nodes": 0, "max": None})
    after = dict(before)
    if guarantee is not None:
        after |= {"guarantee": guarantee, "guarantee_nodes": 0}
    if guarantee_nodes is not None:
        after["guarantee_nodes"] = guarantee_nodes
        after["guarantee"] = guarantee or 0
    if devices is not None or unlimited:
        after["max"] = devices
    return after
