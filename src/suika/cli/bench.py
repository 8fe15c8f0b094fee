"""`suika bench NAME`: the benchmarks behind docs/numbers.

Each lives in `suika.bench.<name>` as `run(<options with defaults>) -> dict`: the function's parameters become the
command's options (typer annotations welcome), the dict is its JSON document.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import click
import typer
from typer.core import TyperGroup

from suika.cli.output import Column, JsonOption, OutputOption, emit

BENCHES: dict[str, str] = {
    "moves": "Bytes of many moves against their exact lower bounds.",
    "redeploy": "Pause and bandwidth of real moves against checkpoint and restart.",
    "decide": "Time of a scheduling decision by cluster size.",
    "estimate": "Errors of the estimator, family by family.",
    "schedule": "Completion times under Suika's policy and every rival.",
}


class LazyBenches(TyperGroup):
    """Imports a benchmark only when it is run: `suika bench --help` stays light."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in BENCHES if find_spec(f"suika.bench.{name}")]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        run = importlib.import_module(f"suika.bench.{name}").run
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(name, help=inspect.getdoc(run))(_printing(run))
        return typer.main.get_command(single)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl([(name, BENCHES[name]) for name in self.list_commands(ctx)])


bench = typer.Typer(cls=LazyBenches, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@bench.callback()
def _bench() -> None:
    """The benchmarks behind docs/numbers; `suika bench NAME --help` lists a benchmark's options."""


def _printing(run: Callable[..., Mapping[str, Any]]) -> Callable[..., None]:
    """`run` with output options added, its result printed instead of returned."""

    def command(output: OutputOption = "table", json: JsonOption = False, **options: Any) -> None:
        document = run(**options)
        rows = _rows(document)
        columns = [Column(key, lambda row, key=key: row.get(key)) for key in dict.fromkeys(k for r in rows for k in r)]
        emit(document, rows, columns, "json" if json else output)

    own = inspect.signature(run, eval_str=True).parameters.values()
    added = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *added)]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _rows(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of a document: its first list of records, else its own scalars as (key, value) rows."""
    for value in document.values():
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            return [_flat(row) for row in value]
    return [{"key": key, "value": value} for key, value in _flat(document).items()]


def _flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Scalars of a nested record under dotted keys; lists are left out of the table."""
    flat: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            flat[f"{prefix}{key}"] = value
    return flat
