"""The whole database in one file, and back: also from SQLite to PostgreSQL and the other way round.

A backup is taken in one read transaction, beside a running controller. It is gzipped JSON lines: a header with the
schema's revision, one line per row, and a last line with the number of rows, so that a cut file is noticed.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, TextIO

from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, Table, func, inspect, select

from suika.control import tables
from suika.control.engines import open_engine
from suika.control.migrate import latest, migrate
from suika.core.errors import require

_FORMAT = 1
_ROWS_AT_ONCE = 500


def backup(url: str, path: Path) -> int:
    """Write all rows of the database at `url` to `path` (by rename: all or nothing). Returns their number.

    Only its owner may read the file: jobs' variables are in it."""
    engine = open_engine(url)
    draft = path.with_name(path.name + ".tmp")
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    isolation = {} if engine.dialect.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
    with engine.connect().execution_options(reads_only=True, **isolation) as connection:
        revision = MigrationContext.configure(connection).get_current_revision()
        require(revision is not None, "database", url, "is not a database of Suika's")
        with gzip.open(draft, "wt", encoding="utf-8") as file:
            num_rows = _write(connection, {"suika_backup": _FORMAT, "revision": revision}, file)
    engine.dispose()
    draft.rename(path)
    return num_rows


def _write(connection: Connection, header: dict[str, Any], file: TextIO) -> int:
    num_rows = 0
    _line(file, header)
    for table in _present(connection):
        for row in connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table)).mappings():
            _line(file, {"table": table.name, "row": dict(row)})
            num_rows += 1
    _line(file, {"num_rows": num_rows})
    return num_rows


def _line(file: TextIO, content: dict[str, Any]) -> None:
    file.write(json.dumps(content, separators=(",", ":"), allow_nan=False) + "\n")


def restore(url: str, path: Path) -> int:
    """Fill the empty database at `url` from `path`, then bring it to this version. Returns the number of rows.

    Everything happens in one transaction: after an error the database holds no row of it.
    """
    header, rows = _read(path)
    engine = open_engine(url)
    migrate(engine, header["revision"])
    with engine.begin() as connection:
        taken = sum(connection.execute(select(func.count()).select_from(t)).scalar_one() for t in _history())
        require(taken == 0, "database", url, "is not empty", "restore into a new one")
        for table in _present(connection):
            connection.execute(table.delete())
            own = [row["row"] for row in rows if row["table"] == table.name]
            for start in range(0, len(own), _ROWS_AT_ONCE):
                connection.execute(table.insert(), own[start : start + _ROWS_AT_ONCE])
    migrate(engine)
    engine.dispose()
    return len(rows)


def _present(connection: Connection) -> list[Table]:
    """This version's tables that the database has: one of an older version lacks the newest."""
    names = set(inspect(connection).get_table_names())
    return [table for table in tables.metadata.sorted_tables if table.name in names]


def _history() -> tuple[Any, ...]:
    return (tables.jobs, tables.events, tables.accounts)


def _read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            header, *rows = (json.loads(line) for line in file)
    except (OSError, EOFError, ValueError) as error:
        require(False, "backup", str(path), f"cannot be read: {error}")
    require(header.get("suika_backup") == _FORMAT, "backup", str(path), "is not a backup of this format")
    complete = bool(rows) and rows[-1] == {"num_rows": len(rows) - 1}
    require(complete, "backup", str(path), "ends too early", "it was cut; use another")
    require(header["revision"] <= latest(), "backup", str(path), "is of a newer Suika", "upgrade this one first")
    return header, rows[:-1]
