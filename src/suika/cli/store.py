"""`suika store backup | restore`: the controller's database in one file, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from suika.cli.output import note

app = typer.Typer(help="Back up and restore the controller's database.", pretty_exceptions_enable=False)
DatabaseOption = Annotated[str | None, typer.Option(help="postgresql://.. ; by default SQLite in $SUIKA_HOME.")]


@app.command()
def backup(file: Annotated[Path, typer.Argument(help="The file to write.")], database: DatabaseOption = None) -> None:
    """Write everything to FILE, beside a running controller."""
    from suika.control.backup import backup as write

    note(f"{write(database_url(database), file)} rows in {file}")


@app.command()
def restore(file: Annotated[Path, typer.Argument(help="A backup.")], database: DatabaseOption = None) -> None:
    """Fill an empty database, of either kind, from FILE. The controller must not run."""
    from suika.control.backup import restore as read

    note(f"{read(database_url(database), file)} rows from {file}")


def database_url(given: str | None) -> str:
    from suika.control.client import home

    return given or f"sqlite:///{home()}/suika.db"
