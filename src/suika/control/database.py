"""A `Store` that outlives its process: SQLAlchemy on SQLite (WAL) or PostgreSQL, by URL.

The present controller is the only writer (`writer.py`), so that it may answer reads of jobs from memory: a write
reaches the database first, its image second. Progress is the one exception: steps are written with the next other
change, or after `PROGRESS_EVERY_S`; a crash loses what the ranks will report again.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select

from suika.control import tables
from suika.control.engines import open_engine
from suika.control.event_rows import event_of, wanted
from suika.control.memory_store import MemoryStore
from suika.control.migrate import migrate
from suika.control.records import job_of, job_row, spec_text
from suika.control.store import EVERY, Event, Head, News, StaleWriteError, Which
from suika.control.writer import FencedError, Writer
from suika.core.cluster import Node
from suika.core.job import ENDED, Job, JobState

_FORGET_NODE = delete(tables.nodes).where(tables.nodes.c.name == bindparam("known"))


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
        self._writer = Writer(self.engine, on_fenced)
        self._lock = self._writer.lock
        self.term = self._writer.term
        self._image = MemoryStore()
        self._snapshots: dict[str, tuple[str, int]] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._load()

    def _load(self) -> None:
        with self._writer.reading() as connection:
            for row in connection.execute(select(tables.jobs)):
                head = Head(row.submitted_s, row.id, row.name, row.tenant, JobState(row.state))
                self._image.add_unread(head, partial(job_of, row))
            for row in connection.execute(select(tables.snapshots)):
                self._snapshots[row.job_id] = (row.path, row.step)
            self._image.set_draining(frozenset(connection.execute(select(tables.draining.c.node)).scalars()))

    @contextmanager
    def together(self) -> Iterator[None]:
        with self._writer.writing():
            yield

    def check_term(self, connection: Connection) -> None:
        """Raise `FencedError` in a transaction of a controller that is not the present one."""
        self._writer.check(connection)

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
        with self._writer.writing() as transaction:
            rows = [job_row(a.job) | {"spec": spec_text(a.job.spec)} for a in arrivals]
            transaction.execute(insert(tables.jobs), rows)
            for arrival in arrivals:
                self._image.add(arrival.job)
                transaction.undo.append(partial(self._image.remove, arrival.job.id))
                if arrival.news is not None:
                    self._writer.tell(transaction, arrival.news, arrival.job.id)

    def put(self, job: Job, news: News | None = None) -> None:
        with self._lock:
            present = self._image.job(job.id)
            if present.version + 1 != job.version:
                raise StaleWriteError(f"{job.id}: version {present.version} was not the one read ({job.version - 1})")
            values = job_row(job) | {"steps_done": present.steps_done}
            if job.spec is not present.spec:
                values["spec"] = spec_text(job.spec)
            with self._writer.writing() as transaction:
                transaction.update(values)
                if news is not None:
                    self._writer.tell(transaction, news, job.id)
                self._image.put(job)
                transaction.undo.append(partial(self._image.replace, present))

    def progress(self, job_id: str, generation: int, steps_done: int) -> bool:
        with self._lock:
            if not self._image.progress(job_id, generation, steps_done):
                return False
            self._writer.progressed(job_id, generation, steps_done)
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
            with self._writer.writing() as transaction:
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
        with self._writer.writing() as writing:
            connection = writing.connection
            row = (columns.job_id == job_id) & (columns.device_type == device_type)
            connection.execute(delete(tables.calibrations).where(row))
            last = connection.execute(select(func.max(columns.seq))).scalar() or 0
            text = json.dumps(record, allow_nan=False)
            values = {"job_id": job_id, "device_type": device_type, "seq": last + 1, "record": text}
            connection.execute(insert(tables.calibrations).values(**values))

    def calibrations(self) -> Mapping[tuple[str, str], Mapping[str, Any]]:
        with self._writer.reading() as connection:
            rows = connection.execute(select(tables.calibrations).order_by(tables.calibrations.c.seq)).all()
        return {(row.job_id, row.device_type): json.loads(row.record) for row in rows}

    # -- events -------------------------------------------------------------------------------------------------------

    def append(self, at_s: float, kind: str, job_id: str | None = None, **data: Any) -> Event:
        with self._writer.writing() as transaction:
            return self._writer.tell(transaction, News(at_s, kind, data), job_id)

    def events(
        self, after: int = 0, job_id: str | None = None, limit: int | None = None, which: Which = EVERY
    ) -> tuple[Event, ...]:
        with self._writer.reading() as connection:
            rows = connection.execute(wanted(after, job_id, limit, which)).all()
        found = tuple(map(event_of, rows))
        return found[::-1] if which.last else found

    def last_seq(self) -> int:
        with self._writer.reading() as connection:
            return connection.execute(select(func.max(tables.events.c.seq))).scalar() or 0

    # -- nodes --------------------------------------------------------------------------------------------------------

    def draining(self) -> frozenset[str]:
        return self._image.draining()

    def set_draining(self, nodes: frozenset[str]) -> None:
        with self._lock, self._writer.writing() as transaction:
            transaction.execute(delete(tables.draining))
            if nodes:
                rows = [{"node": node} for node in sorted(nodes)]
                transaction.execute(insert(tables.draining), rows)
            transaction.undo.append(partial(self._image.set_draining, self._image.draining()))
            self._image.set_draining(nodes)

    def nodes(self) -> tuple[Node, ...]:
        """Nodes that have joined at some time, in the order of their names."""
        with self._writer.reading() as connection:
            rows = connection.execute(select(tables.nodes).order_by(tables.nodes.c.name)).all()
        return tuple(Node(**json.loads(row.record)) for row in rows)

    def remember(self, *nodes: Node) -> None:
        """A restarted controller expects these nodes."""
        rows = [{"name": node.name, "record": json.dumps(asdict(node))} for node in nodes]
        if rows:
            with self._writer.writing() as transaction:
                transaction.execute(_FORGET_NODE, [{"known": row["name"]} for row in rows])
                transaction.execute(insert(tables.nodes), rows)

    def close(self) -> None:
        """Write what is left to write and let go of the database."""
        try:
            if self._writer.progress:
                self._writer.flush()
        except FencedError:
            pass  # the successor's ranks report it
        self.engine.dispose()
