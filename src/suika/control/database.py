"""A `Store` that outlives its process: SQLAlchemy on SQLite (WAL) or PostgreSQL, by URL.

Who opens it raises the controller's term; from then on every write of an earlier opener is refused, in the same
transaction that would have written. Because of that the present opener is the only writer, so that it may answer reads
of jobs from memory: a write reaches the database first, its image second. Progress is the one exception: steps are
written with the next other change, or after `PROGRESS_EVERY_S`; a crash loses what the ranks will report again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, delete, event, func, insert, select, update

from suika.control import tables
from suika.control.migrate import migrate
from suika.control.records import job_of, job_row, spec_text
from suika.control.store import Event, MemoryStore, News, StaleWriteError
from suika.core.cluster import Node
from suika.core.job import ENDED, Job

PROGRESS_EVERY_S = 1.0
_SQLITE_WAIT_S = 30.0


class FencedError(StaleWriteError):
    """Another controller has taken over: this one must not write any more."""


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


class DatabaseStore:
    """The `Store` at `url`, brought up to date by migrations. `on_fenced` is called when another took over."""

    def __init__(self, url: str, on_fenced: Callable[[], None] = lambda: None) -> None:
        self.engine = open_engine(url)
        migrate(self.engine)
        self._on_fenced = on_fenced
        self._lock = threading.RLock()
        self._image = MemoryStore()
        self._snapshots: dict[str, tuple[str, int]] = {}
        self._progress: dict[str, tuple[int, int]] = {}  # job -> (generation, steps done), not written yet
        self._flushed_s = time.monotonic()
        self.term = self._take_over()
        self._load()

    def _take_over(self) -> int:
        with self.engine.begin() as connection:
            column = tables.controller.c.term
            if connection.execute(update(tables.controller).values(term=column + 1)).rowcount == 0:
                connection.execute(insert(tables.controller).values(id=1, term=1))
            return int(connection.execute(select(column)).scalar_one())

    def _load(self) -> None:
        with self._reading() as connection:
            for row in connection.execute(select(tables.jobs)):
                self._image.add(job_of(row))
            for row in connection.execute(select(tables.snapshots)):
                self._snapshots[row.job_id] = (row.path, row.step)
            self._image.set_draining(frozenset(connection.execute(select(tables.draining.c.node)).scalars()))
            self._last_seq = connection.execute(select(func.max(tables.events.c.seq))).scalar() or 0

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            yield connection.execution_options(reads_only=True)

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        """One transaction of the present controller; raises `FencedError` for any other."""
        with self._lock:
            last_seq = self._last_seq
            try:
                with self.engine.begin() as connection:
                    self._check_term(connection)
                    self._flush_progress(connection)
                    yield connection
            except BaseException:
                self._last_seq = last_seq  # nothing was written: no number is used up
                raise
            self._progress.clear()

    def _check_term(self, connection: Connection) -> None:
        # On PostgreSQL the shared lock makes a take-over wait for this transaction, or this one see it.
        term = connection.execute(select(tables.controller.c.term).with_for_update(read=True)).scalar_one()
        if term != self.term:
            self._on_fenced()
            raise FencedError(f"term {term} has begun; this controller's was {self.term}")

    def _flush_progress(self, connection: Connection) -> None:
        for job_id, (generation, steps_done) in self._progress.items():
            row = (tables.jobs.c.id == job_id) & (tables.jobs.c.generation == generation)
            connection.execute(update(tables.jobs).where(row).values(steps_done=steps_done))
        self._flushed_s = time.monotonic()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def add(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            with self._writing() as connection:
                connection.execute(insert(tables.jobs).values(**job_row(job), spec=spec_text(job.spec)))
                if news is not None:
                    self._tell(connection, news, job.id)
            self._image.add(job)

    def put(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            present = self._image.job(job.id)
            values = job_row(job) | {"steps_done": present.steps_done}
            if job.spec is not present.spec:
                values["spec"] = spec_text(job.spec)
            with self._writing() as connection:
                row = (tables.jobs.c.id == job.id) & (tables.jobs.c.version == job.version - 1)
                if connection.execute(update(tables.jobs).where(row).values(**values)).rowcount != 1:
                    raise StaleWriteError(f"{job.id}: the version read ({job.version - 1}) is not the present one")
                if news is not None:
                    self._tell(connection, news, job.id)
            self._image.put(job)

    def progress(self, job_id: str, generation: int, steps_done: int) -> bool:
        with self._lock:
            if not self._image.progress(job_id, generation, steps_done):
                return False
            self._progress[job_id] = (generation, steps_done)
            if time.monotonic() - self._flushed_s > PROGRESS_EVERY_S:
                with self._writing():
                    pass
            return True

    def job(self, job_id: str) -> Job:
        return self._image.job(job_id)

    def jobs(self) -> tuple[Job, ...]:
        return self._image.jobs()

    def saved(self, job_id: str, generation: int, step: int, path: str) -> bool:
        with self._lock:
            present = self._image.job(job_id)
            if present.generation != generation or present.state in ENDED:
                return False
            with self._writing() as connection:
                connection.execute(delete(tables.snapshots).where(tables.snapshots.c.job_id == job_id))
                values = {"job_id": job_id, "generation": generation, "step": step, "path": path}
                connection.execute(insert(tables.snapshots).values(**values))
            self._snapshots[job_id] = (path, step)
            return True

    def snapshot(self, job_id: str) -> tuple[str, int] | None:
        return self._snapshots.get(job_id)

    # -- events -------------------------------------------------------------------------------------------------------

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event:
        with self._writing() as connection:
            return self._tell(connection, News(at_s, kind, data), job_id)

    def _tell(self, connection: Connection, news: News, job_id: str | None) -> Event:
        told = Event(self._last_seq + 1, news.at_s, news.kind, job_id, news.data)
        values = told.to_dict() | {"data": json.dumps(told.data, allow_nan=False)}
        connection.execute(insert(tables.events).values(**values))
        self._last_seq = told.seq
        return told

    def events(self, after: int = 0, job_id: str | None = None, limit: int | None = None) -> tuple[Event, ...]:
        columns = tables.events.c
        wanted = select(tables.events).where(columns.seq > after).order_by(columns.seq).limit(limit)
        if job_id is not None:
            wanted = wanted.where(columns.job_id == job_id)
        with self._reading() as connection:
            rows = connection.execute(wanted).all()
        return tuple(Event(row.seq, row.at_s, row.kind, row.job_id, json.loads(row.data)) for row in rows)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def draining(self) -> frozenset[str]:
        return self._image.draining()

    def set_draining(self, nodes: frozenset[str]) -> None:
        with self._lock:
            with self._writing() as connection:
                connection.execute(delete(tables.draining))
                if nodes:
                    connection.execute(insert(tables.draining), [{"node": node} for node in sorted(nodes)])
            self._image.set_draining(nodes)

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that have joined at some time, in the order of their names."""
        with self._reading() as connection:
            rows = connection.execute(select(tables.nodes).order_by(tables.nodes.c.name)).all()
        return tuple(Node(**json.loads(row.record)) for row in rows)

    def remember(self, node: Node) -> None:
        """A restarted controller expects this node."""
        with self._writing() as connection:
            connection.execute(delete(tables.nodes).where(tables.nodes.c.name == node.name))
            connection.execute(insert(tables.nodes).values(name=node.name, record=json.dumps(asdict(node))))

    def close(self) -> None:
        """Write what is left to write and let go of the database."""
        try:
            if self._progress:
                with self._writing():
                    pass
        except FencedError:
            pass  # the successor's ranks report it
        self.engine.dispose()
