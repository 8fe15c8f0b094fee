"""The conformance suite against the stores that need no service: memory and SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest
from conformance import DurableConformance, StoreConformance, running

from suika.control.database import DatabaseStore
from suika.control.memory_store import MemoryStore
from suika.control.migrate import NewerDatabaseError
from suika.control.store import Store


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


class TestSqlite(DurableConformance):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/store.db"

    @pytest.fixture
    def empty_url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/other.db"

    def test_a_database_of_a_newer_version_is_refused_untouched(self, url: str) -> None:
        from sqlalchemy import text

        store = DatabaseStore(url)
        running(store)
        with store.engine.begin() as connection:
            connection.execute(text("update alembic_version set version_num = '9999'"))
        store.close()
        with pytest.raises(NewerDatabaseError, match="9999"):
            DatabaseStore(url)

    def test_progress_reaches_the_disk_without_a_close(self, url: str) -> None:
        store = DatabaseStore(url)
        running(store)
        store.progress("j1", 1, 12)
        store.append(1.0, "tick")  # any change takes the steps along
        assert DatabaseStore(url).job("j1").steps_done == 12
