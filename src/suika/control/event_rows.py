"""Events as rows of a database: written, asked for, read back."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, or_, select

from suika.control import tables
from suika.control.store import CONCERN_ALL, Event, Which


def event_row(event: Event) -> dict[str, Any]:
    return event.to_dict() | {"data": json.dumps(event.data, allow_nan=False)}


def event_of(row: Row[Any]) -> Event:
    return Event(row.seq, row.at_s, row.kind, row.job_id, json.loads(row.data))


def wanted(after: int, job_id: str | None, limit: int | None, which: Which) -> Select[Any]:
    """Rows of the events that `Store.events` is asked for; if the last are, newest first."""
    columns = tables.events.c
    found = select(tables.events).where(columns.seq > after, *_conditions(which)).limit(limit)
    found = found.order_by(columns.seq.desc() if which.last else columns.seq)
    return found if job_id is None else found.where(columns.job_id == job_id)


def _conditions(which: Which) -> list[ColumnElement[bool]]:
    columns = tables.events.c
    found: list[ColumnElement[bool]] = []
    if which.kinds is not None:
        found.append(columns.kind.in_(sorted(which.kinds)))
    if which.before is not None:
        found.append(columns.seq < which.before)
    if which.since_s is not None:
        found.append(columns.at_s >= which.since_s)
    if which.tenant is not None:
        own = select(tables.jobs.c.id).where(tables.jobs.c.tenant == which.tenant)
        of_all = or_(*(columns.kind.startswith(start) for start in CONCERN_ALL))
        found.append(or_(columns.job_id.in_(own), and_(columns.job_id.is_(None), of_all)))
    return found
