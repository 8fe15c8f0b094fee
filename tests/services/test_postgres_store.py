"""The store's conformance suite against a real PostgreSQL server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance import DurableConformance, running

from suika.control.backup import backup, restore
from suika.control.database import DatabaseStore
from suika.control.writer import FencedError

pytestmark = pytest.mark.service


class TestPostgres(DurableConformance):
    @pytest.fixture
    def url(self, new_database: Callable[[], str]) -> str:
        return new_database()

    @pytest.fixture
    def empty_url(self, new_database: Callable[[], str]) -> str:
        return new_database()

    def test_a_take_over_in_the_midst_of_writes_loses_none_and_admits_none(self, url: str) -> None:
        old = DatabaseStore(url)
        accepted: list[int] = []

        def write() -> None:
            try:
                while True:
                    accepted.append(old.append(0.0, "tick").seq)
            except FencedError:
                return

        writer = threading.Thread(target=write)
        writer.start()
        while len(accepted) < 20:
            pass
        new = DatabaseStore(url)
        writer.join(30)
        assert [event.seq for event in new.events()] == accepted

    def test_from_sqlite_to_postgres(self, url: str, tmp_path: Path) -> None:
        small = DatabaseStore(f"sqlite:///{tmp_path}/small.db")
        running(small)
        small.append(1.0, "tick", "j1", number=1)
        backup(f"sqlite:///{tmp_path}/small.db", tmp_path / "backup.gz")
        restore(url, tmp_path / "backup.gz")
        big = DatabaseStore(url)
        assert big.jobs() == small.jobs()
        assert [event.to_dict() for event in big.events()] == [event.to_dict() for event in small.events()]
