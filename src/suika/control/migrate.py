"""Brings a database to this version's tables, by alembic's migrations; any older version of Suika's is a start."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

_FOLDER = Path(__file__).parent / "migrations"


class NewerDatabaseError(RuntimeError):
    """The database was written by a newer Suika than this one."""


def migrate(engine: Engine, revision: str = "head") -> None:
    """All missing migrations, in one transaction: a failure leaves the database as it was."""
    with engine.begin() as connection:
        present = MigrationContext.configure(connection).get_current_revision()
        known = {script.revision for script in ScriptDirectory(str(_FOLDER)).walk_revisions()}
        if present is not None and present not in known:
            raise NewerDatabaseError(
                f"the database is at revision {present}, which this version of Suika does not know"
            )
        if present != latest():
            settings = Config()
            settings.set_main_option("script_location", str(_FOLDER))
            settings.attributes["connection"] = connection
            command.upgrade(settings, revision)


def latest() -> str:
    head = ScriptDirectory(str(_FOLDER)).get_current_head()
    assert head is not None
    return head
