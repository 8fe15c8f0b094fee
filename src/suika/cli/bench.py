"""`suika bench NAME`: the benchmarks behind docs/numbers.

Each lives in `suika.bench.<name>` as `run(<options with defaults>) -> dict`: the function's parameters become the
command's options (typer annotations welcome), the dict is its JSON document.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from operator import itemgetter
from typing import Any

import typer

from suika.cli.output import Column, JsonOption, OutputOption, emit, note

BENCHES: dict[str, str] = {
    "moves": "Bytes of many moves against their exact lower bounds.",
    "redeploy": "Pause and bandwidth of real moves against checkpoint and restart.",
    "recover": "Times to come up, to notice a death, to train again, and to call a move off.",
    "decide": "Time of a scheduling decision by cluster size.",
    "charge": "The formula by which simulations charge decisions, fitted anew.",
    "estimate": "Errors of the estimator, family by family.",
    "emulate": "A workload in the simulator, and through the real controller on emulated devices.",
    "schedule": "Completion times under Suika's policy and every rival.",
}


class Benches(typer.Typer):
    """A table of benchmarks, each imported only when it is run."""

    def __call__(self, args: Sequence[str] = (), prog_name: str = "suika bench") -> None:
        name, *rest = args or ["--help"]
        if name in ("-h", "--help"):
            print(help_text(), end="")
            return
        if name not in BENCHES or not find_spec(f"suika.bench.{name}"):
            note(f"suika: no benchmark '{name}'; `suika bench --help` lists them")
            sys.exit(2)
        run = importlib.import_module(f"suika.bench.{name}").run
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        single.command(help=inspect.getdoc(run))(_printing(run))
        single(args=rest, prog_name=f"{prog_name} {name}")


bench = Benches()


def help_text() -> str:
    known = {name: line for name, line in BENCHES.items() if find_spec(f"suika.bench.{name}")}
    rows = "\n".join(f"  {name:10}{line}" for name, line in known.items())
    return (
        "Usage: suika bench NAME [OPTIONS]\n\n"
        "  The benchmarks behind docs/numbers; `suika bench NAME --help` lists a benchmark's options.\n\n"
        f"Benchmarks:\n{rows}\n"
    )


def _printing(run: Callable[..., Mapping[str, Any]]) -> Callable[..., None]:
    """`run` with output options added, its result printed instead of returned."""

    def command(output: OutputOption = "table", json: JsonOption = False, **options: Any) -> None:
        document = run(**options)
        rows = _rows(document)
        columns = [Column(key, itemgetter(key)) for key in rows[0]] if rows else []
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
            rows = [_flat(row) for row in value]
            keys = dict.fromkeys(key for row in rows for key in row)
            return [{key: row.get(key) for key in keys} for row in rows]
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
