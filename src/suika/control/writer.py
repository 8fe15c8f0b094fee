"""The present controller as the only writer of its database.

Who becomes it raises the term; from then on every write of an earlier one is refused, in the same transaction that
would have written. A transaction holds all that belongs together, and takes it back, in memory too, if it cannot be
written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from sqlalchemy import Connection, Engine, bindparam, func, insert, select, update
from sqlalchemy.exc import OperationalError

from suika.control import tables
from suika.control.event_rows import event_row
from suika.control.store import Event, News, StaleWriteError, StoreAwayError

PROGRESS_EVERY_S = 1.0
_PROGRESS = (
    update(tables.jobs)
    .where((tables.jobs.c.id == bindparam("of")) & (tables.jobs.c.generation == bindparam("then")))
    .values(steps_done=bindparam("now"))
)
_KEYS = frozenset(("of", "before"))


class FencedError(StaleWriteError):
    """Another controller has taken over: this one must not write any more."""


class Transaction:
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


class Writer:
    """Of the database behind `engine`. `on_fenced` is called when another took over. Safe from any thread."""

    def __init__(self, engine: Engine, on_fenced: Callable[[], None]) -> None:
        self._engine, self._on_fenced = engine, on_fenced
        self.lock = threading.RLock()
        self.progress: dict[str, tuple[int, int]] = {}  # job -> (generation, steps done), not written yet
        self._open: Transaction | None = None
        self._flushed_s = time.monotonic()
        self.term = self._take_over()
        with self.reading() as connection:
            self.last_seq: int = connection.execute(select(func.max(tables.events.c.seq))).scalar() or 0

    def _take_over(self) -> int:
        with self._engine.begin() as connection:
            column = tables.controller.c.term
            if connection.execute(update(tables.controller).values(term=column + 1)).rowcount == 0:
                connection.execute(insert(tables.controller).values(id=1, term=1))
            return int(connection.execute(select(column)).scalar_one())

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection.execution_options(reads_only=True)
        except OperationalError as error:
            raise StoreAwayError(f"the store cannot be read: {error.orig}") from error

    @contextmanager
    def writing(self) -> Iterator[Transaction]:
        """The transaction of the present controller that is open on this thread, or a new one; raises `FencedError`
        for any other controller. An error takes back everything since it was opened, also in the image."""
        with self.lock:
            if self._open is not None:
                yield self._open
                return
            last_seq = self.last_seq
            try:
                with self._engine.begin() as connection:
                    self._open = Transaction(connection)
                    self.check(connection)
                    yield self._open
                    self._open.flush()
                    self._flush_progress(connection)
            except BaseException as error:
                self.last_seq = last_seq  # nothing was written: no number is used up
                if self._open is not None:
                    self._open.take_back()
                if isinstance(error, OperationalError):
                    raise StoreAwayError(f"the store cannot be written: {error.orig}") from error
                raise
            finally:
                self._open = None
            self.progress.clear()

    def check(self, connection: Connection) -> None:
        """Raise `FencedError` in a transaction of a controller that is not the present one."""
        # On PostgreSQL the shared lock makes a take-over wait for this transaction, or this one see it.
        term = connection.execute(select(tables.controller.c.term).with_for_update(read=True)).scalar_one()
        if term != self.term:
            self._on_fenced()
            raise FencedError(f"term {term} has begun; this controller's was {self.term}")

    def _flush_progress(self, connection: Connection) -> None:
        rows = [{"of": job, "then": generation, "now": steps} for job, (generation, steps) in self.progress.items()]
        if rows:
            connection.execute(_PROGRESS, rows)
        self._flushed_s = time.monotonic()

    def tell(self, transaction: Transaction, news: News, job_id: str | None) -> Event:
        """Number an event, and have it written with the transaction."""
        told = Event(self.last_seq + 1, news.at_s, news.kind, job_id, news.data)
        transaction.events.append(event_row(told))
        self.last_seq = told.seq
        return told

    def progressed(self, job_id: str, generation: int, steps_done: int) -> None:
        """Written with the next change, or soon. The caller holds the lock."""
        self.progress[job_id] = (generation, steps_done)
        if time.monotonic() - self._flushed_s > PROGRESS_EVERY_S:
            with suppress(StoreAwayError):  # what cannot be written now is written later
                self.flush()

    def flush(self) -> None:
        """Write the progress that is not written yet."""
        with self.writing():
            pass
