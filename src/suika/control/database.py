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
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    and_,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.exc import OperationalError

from suika.control import tables
from suika.control.memory_store import MemoryStore
from suika.control.migrate import migrate
from suika.control.records import job_of, job_row, spec_text
from suika.control.store import (
    CONCERN_ALL,
    EVERY,
    Event,
    Head,
    News,
    StaleWriteError,
    StoreAwayError,
    Which,
)
from suika.core.cluster import Node
from suika.core.job import ENDED, Job, JobState

PROGRESS_EVERY_S = 1.0
_SQLITE_WAIT_S = 30.0


_PROGRESS = (
    update(tables.jobs)
    .where((tables.jobs.c.id == bindparam("of")) & (tables.jobs.c.generation == bindparam("then")))
    .values(steps_done=bindparam("now"))
)
_FORGET_NODE = delete(tables.nodes).where(tables.nodes.c.name == bindparam("known"))


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


class _Transaction:
    """What one transaction will write; rows of one kind are written together. `undo`: takes back what the image shows
    already, newest last."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.events: list[dict[str, Any]] = []
        self.undo: list[Callable[[], None]] = []
        self._updates: list[dict[str, Any]] = []

    def execute(self, *arguments: Any) -> Any:
        """At once, as `Connection.execute` does."""
        return self.connection.execute(*arguments)

    def update(self, values: Mapping[str, Any]) -> None:
        """A job's next version."""
        if self._updates and self._updates[0].keys() != values.keys() | _KEYS:
            self._flush_updates()
        self._updates.append({**values, "of": values["id"], "before": values["version"] - 1})

    def flush(self) -> None:
        self._flush_updates()
        if self.events:
            self.connection.execute(insert(tables.events), self.events)

    def _flush_updates(self) -> None:
        if self._updates:
            rows = update(tables.jobs).where(
                (tables.jobs.c.id == bindparam("of")) & (tables.jobs.c.version == bindparam("before"))
            )
            done = self.connection.execute(rows, self._updates)
            assert done.rowcount in (-1, len(self._updates)), "a job was written by somebody who is not the controller"
            self._updates = []

    def take_back(self) -> None:
        for action in reversed(self.undo):
            action()


_KEYS = frozenset(("of", "before"))


@dataclass
class _Arrival:
    """A job on its way into the store."""

    job: Job
    news: News | None
    written: bool = False
    error: Exception | None = None


class DatabaseStore:
    """The `Store` at `url`, brought up to date by migrations. `on_fenced` is called when another took over."""

    def __init__(self, url: str, on_fenced: Callable[[], None] = lambda: None) -> None:
        self.engine = open_engine(url)
        migrate(self.engine)
        self._on_fenced = on_fenced
        self._lock = threading.RLock()
        self._image = MemoryStore()
        self._snapshots: dict[str, tuple[str, int]] = {}
        self._open: _Transaction | None = None
        self._arrivals: deque[_Arrival] = deque()
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
                head = Head(row.submitted_s, row.id, row.name, row.tenant, JobState(row.state))
                self._image.add_unread(head, partial(job_of, row))
            for row in connection.execute(select(tables.snapshots)):
                self._snapshots[row.job_id] = (row.path, row.step)
            self._image.set_draining(frozenset(connection.execute(select(tables.draining.c.node)).scalars()))
            self._last_seq = connection.execute(select(func.max(tables.events.c.seq))).scalar() or 0

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        with self.engine.connect() as connection:
            yield connection.execution_options(reads_only=True)

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._writing():
            yield

    @contextmanager
    def _writing(self) -> Iterator[_Transaction]:
        """The transaction of the present controller that is open on this thread, or a new one; raises `FencedError`
        for any other controller. An error takes back everything since it was opened, also in the image."""
        with self._lock:
            if self._open is not None:
                yield self._open
                return
            last_seq = self._last_seq
            try:
                with self.engine.begin() as connection:
                    self._open = _Transaction(connection)
                    self.check_term(connection)
                    yield self._open
                    self._open.flush()
                    self._flush_progress(connection)
            except BaseException as error:
                self._last_seq = last_seq  # nothing was written: no number is used up
                if self._open is not None:
                    self._open.take_back()
                if isinstance(error, OperationalError):
                    raise StoreAwayError(f"the store cannot be written: {error.orig}") from error
                raise
            finally:
                self._open = None
            self._progress.clear()

    def check_term(self, connection: Connection) -> None:
        """Raise `FencedError` in a transaction of a controller that is not the present one."""
        # On PostgreSQL the shared lock makes a take-over wait for this transaction, or this one see it.
        term = connection.execute(select(tables.controller.c.term).with_for_update(read=True)).scalar_one()
        if term != self.term:
            self._on_fenced()
            raise FencedError(f"term {term} has begun; this controller's was {self.term}")

    def _flush_progress(self, connection: Connection) -> None:
        rows = [{"of": job, "then": generation, "now": steps} for job, (generation, steps) in self._progress.items()]
        if rows:
            connection.execute(_PROGRESS, rows)
        self._flushed_s = time.monotonic()

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def add(self, job: Job, news: News | None = None) -> None:
        """Jobs that come while another transaction is written go into the next one together."""
        mine = _Arrival(job, news)
        self._arrivals.append(mine)
        with self._lock:
            if not mine.written:
                self._add_arrivals()
        if mine.error is not None:
            raise mine.error

    def _add_arrivals(self) -> None:
        arrivals = [self._arrivals.popleft() for _ in range(len(self._arrivals))]
        try:
            self._add_all(arrivals)
        except Exception as failure:
            for arrival in arrivals:
                arrival.error = failure
            if len(arrivals) > 1 and not isinstance(failure, FencedError):
                for arrival in arrivals:  # one that cannot be stored must not keep the others out
                    arrival.error = self._error_of_adding(arrival)
        for arrival in arrivals:
            arrival.written = True

    def _error_of_adding(self, arrival: _Arrival) -> Exception | None:
        try:
            self._add_all([arrival])
        except Exception as error:
            return error
        return None

    def _add_all(self, arrivals: Sequence[_Arrival]) -> None:
        with self._writing() as transaction:
            rows = [job_row(a.job) | {"spec": spec_text(a.job.spec)} for a in arrivals]
            transaction.execute(insert(tables.jobs), rows)
            for arrival in arrivals:
                self._image.add(arrival.job)
                transaction.undo.append(partial(self._image.remove, arrival.job.id))
                if arrival.news is not None:
                    self._tell(transaction, arrival.news, arrival.job.id)

    def put(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            present = self._image.job(job.id)
            if present.version + 1 != job.version:
                raise StaleWriteError(f"{job.id}: version {present.version} was not the one read ({job.version - 1})")
            values = job_row(job) | {"steps_done": present.steps_done}
            if job.spec is not present.spec:
                values["spec"] = spec_text(job.spec)
            with self._writing() as transaction:
                transaction.update(values)
                if news is not None:
                    self._tell(transaction, news, job.id)
                self._image.put(job)
                transaction.undo.append(partial(self._image.replace, present))

    def progress(self, job_id: str, generation: int, steps_done: int) -> bool:
        with self._lock:
            if not self._image.progress(job_id, generation, steps_done):
                return False
            self._progress[job_id] = (generation, steps_done)
            if time.monotonic() - self._flushed_s > PROGRESS_EVERY_S:
                with suppress(StoreAwayError), self._writing():  # what cannot be written now is written later
                    pass
            return True

    def job(self, job_id: str) -> Job:
        return self._image.job(job_id)

    def jobs(self) -> tuple[Job, ...]:
        return self._image.jobs()

    def active(self) -> tuple[Job, ...]:
        return self._image.active()

    def heads(self) -> tuple[Head, ...]:
        return self._image.heads()

    def named(self, name: str) -> tuple[Head, ...]:
        return self._image.named(name)

    def saved(self, job_id: str, generation: int, step: int, path: str) -> bool:
        with self._lock:
            present = self._image.job(job_id)
            if present.generation != generation or present.state in ENDED:
                return False
            before = self._snapshots.get(job_id)
            with self._writing() as transaction:
                transaction.execute(delete(tables.snapshots).where(tables.snapshots.c.job_id == job_id))
                values = {"job_id": job_id, "generation": generation, "step": step, "path": path}
                transaction.execute(insert(tables.snapshots).values(**values))
                self._snapshots[job_id] = (path, step)
                transaction.undo.append(partial(self._restore_snapshot, job_id, before))
            return True

    def _restore_snapshot(self, job_id: str, before: tuple[str, int] | None) -> None:
        if before is None:
            del self._snapshots[job_id]
        else:
            self._snapshots[job_id] = before

    def snapshot(self, job_id: str) -> tuple[str, int] | None:
        return self._snapshots.get(job_id)

    # -- calibrations -------------------------------------------------------------------------------------------------

    def calibrated(self, job_id: str, device_type: str, record: Mapping[str, Any]) -> None:
        columns = tables.calibrations.c
        with self._writing() as writing:
            connection = writing.connection
            row = (columns.job_id == job_id) & (columns.device_type == device_type)
            connection.execute(delete(tables.calibrations).where(row))
            last = connection.execute(select(func.max(columns.seq))).scalar() or 0
            text = json.dumps(record, allow_nan=False)
            values = {"job_id": job_id, "device_type": device_type, "seq": last + 1, "record": text}
            connection.execute(insert(tables.calibrations).values(**values))

    def calibrations(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        with self._reading() as connection:
            rows = connection.execute(select(tables.calibrations).order_by(tables.calibrations.c.seq)).all()
        return {(row.job_id, row.device_type): json.loads(row.record) for row in rows}

    # -- events -------------------------------------------------------------------------------------------------------

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event:
        with self._writing() as transaction:
            return self._tell(transaction, News(at_s, kind, data), job_id)

    def _tell(self, transaction: _Transaction, news: News, job_id: str | None) -> Event:
        told = Event(self._last_seq + 1, news.at_s, news.kind, job_id, news.data)
        transaction.events.append(told.to_dict() | {"data": json.dumps(told.data, allow_nan=False)})
        self._last_seq = told.seq
        return told

    def events(
        self, after: int = 0, job_id: str | None = None, limit: int | None = None, which: Which = EVERY
    ) -> tuple[Event, ...]:
        columns = tables.events.c
        wanted = select(tables.events).where(columns.seq > after, *_conditions(which)).limit(limit)
        wanted = wanted.order_by(columns.seq.desc() if which.last else columns.seq)
        if job_id is not None:
            wanted = wanted.where(columns.job_id == job_id)
        with self._reading() as connection:
            rows = connection.execute(wanted).all()
        found = tuple(Event(row.seq, row.at_s, row.kind, row.job_id, json.loads(row.data)) for row in rows)
        return found[::-1] if which.last else found

    def last_seq(self) -> int:
        with self._reading() as connection:
            return connection.execute(select(func.max(tables.events.c.seq))).scalar() or 0

    # -- nodes --------------------------------------------------------------------------------------------------------

    def draining(self) -> frozenset[str]:
        return self._image.draining()

    def set_draining(self, nodes: frozenset[str]) -> None:
        with self._lock:
            with self._writing() as transaction:
                transaction.execute(delete(tables.draining))
                if nodes:
                    rows = [{"node": node} for node in sorted(nodes)]
                    transaction.execute(insert(tables.draining), rows)
            self._image.set_draining(nodes)

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that have joined at some time, in the order of their names."""
        with self._reading() as connection:
            rows = connection.execute(select(tables.nodes).order_by(tables.nodes.c.name)).all()
        return tuple(Node(**json.loads(row.record)) for row in rows)

    def remember(self, *nodes: Node) -> None:
        """A restarted controller expects these nodes."""
        rows = [{"name": node.name, "record": json.dumps(asdict(node))} for node in nodes]
        if rows:
            with self._writing() as transaction:
                transaction.execute(_FORGET_NODE, [{"known": row["name"]} for row in rows])
                transaction.execute(insert(tables.nodes), rows)

    def close(self) -> None:
        """Write what is left to write and let go of the database."""
        try:
            if self._progress:
                with self._writing():
                    pass
        except FencedError:
            pass  # the successor's ranks report it
        self.engine.dispose()
