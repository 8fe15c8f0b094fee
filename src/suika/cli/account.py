"""`suika account`: who may use the network door. Works on the controller's own machine, on its database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from suika.cli.output import Column, JsonOption, OutputOption, emit, note
from suika.cli.store import DatabaseOption, database_url

if TYPE_CHECKING:
    from suika.control.accounts import Accounts

app = typer.Typer(help="Accounts, their roles and tokens.", pretty_exceptions_enable=False)
NameArgument = Annotated[str, typer.Argument(help="The account.")]
COLUMNS = [Column(key.upper(), lambda row, key=key: row[key]) for key in ("name", "role", "tenant")]  # type: ignore[misc]


@app.command()
def add(
    name: NameArgument,
    role: Annotated[Literal["admin", "operator", "user", "read", "node"], typer.Option(help="What it may do.")],
    tenant: Annotated[str | None, typer.Option(help="Whose jobs it sees; for user and read.")] = None,
    database: DatabaseOption = None,
) -> None:
    """Add an account and print its first token, this once."""
    from suika.control.auth import Role

    accounts = _accounts(database)
    accounts.add(name, Role(role), tenant)
    print(accounts.issue(name))


@app.command("list")
def list_(database: DatabaseOption = None, output: OutputOption = "table", json: JsonOption = False) -> None:
    """All accounts."""
    rows = [{"name": a.name, "role": a.role.value, "tenant": a.tenant} for a in _accounts(database).all()]
    emit({"accounts": rows}, rows, COLUMNS, "json" if json else output)


@app.command()
def token(
    name: NameArgument,
    lifetime: Annotated[float | None, typer.Option(min=1, help="Seconds; by default without an end.")] = None,
    database: DatabaseOption = None,
) -> None:
    """Print a new token for an account, this once."""
    print(_accounts(database).issue(name, lifetime))


@app.command()
def revoke(name: NameArgument, database: DatabaseOption = None) -> None:
    """Make all tokens of an account void."""
    note(f"{_accounts(database).revoke(name)} tokens of {name} are void")


@app.command()
def remove(name: NameArgument, database: DatabaseOption = None) -> None:
    """Remove an account and its tokens."""
    _accounts(database).remove(name)
    note(f"{name} is gone")


def _accounts(database: str | None) -> Accounts:
    from suika.control.accounts import Accounts
    from suika.control.engines import open_engine
    from suika.control.migrate import migrate

    engine = open_engine(database_url(database))
    migrate(engine)
    return Accounts(engine)
