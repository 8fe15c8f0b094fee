"""One PostgreSQL server for all tests here; each test has a database of its own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "control"):
    sys.path.insert(0, str(folder))

import postgres  # noqa: E402


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    with postgres.server() as url:
        yield url


_number = itertools.count()


@pytest.fixture
def new_database(postgres_url: str):
    """A function that makes an empty database and gives its URL."""
    from sqlalchemy import text

    from suika.control.engines import open_engine

    def make() -> str:
        name = f"suika_{next(_number)}"
        engine = open_engine(postgres_url)
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text(f"create database {name}"))
        engine.dispose()
        return postgres_url.replace("/postgres?", f"/{name}?")

    return make
