"""Databases by URL: SQLite (WAL) and PostgreSQL, so that a crash of a process loses nothing that was committed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event

_SQLITE_WAIT_S = 30.0


def open_engine(url: str) -> Engine:
    """`sqlite:////path/file.db` or `postgresql://user@host/name`; a crash of this process loses nothing committed."""
    if url.startswith(("postgresql://", "postgres://")):
        url = "postgresql+psycopg://" + url.partition("://")[2]
    engine = create_engine(url, pool_pre_ping=True)
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # transactions begin where `_begin_sqlite` says, not at the first write
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_SQLITE_WAIT_S * 1000}"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    """A transaction that will write holds the write lock from its first read on: it never has to start again."""
    reads = connection.get_execution_options().get("reads_only", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
