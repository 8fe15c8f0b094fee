"""What every command prints: one table or one JSON/YAML document on stdout; progress and notes go to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from suika.core.words import plain, seconds, size

__all__ = [
    "Column",
    "Format",
    "JsonOption",
    "OutputOption",
    "emit",
    "emit_document",
    "harmless",
    "note",
    "seconds",
    "size",
    "stdout",
]

if TYPE_CHECKING:
    from rich.console import Console

Format = Literal["table", "wide", "json", "yaml"]
OutputOption = Annotated[Format, typer.Option("-o", "--output", help="table, wide, json or yaml.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as -o json.")]


class Column:
    """A table column: its title, how to get its text from a row, and whether only `-o wide` shows it."""

    def __init__(self, title: str, text: Callable[[Mapping[str, Any]], object], wide: bool = False) -> None:
        self.title, self.text, self.wide = title, text, wide


def emit(document: Any, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], output: Format) -> None:
    """Print `document` as JSON or YAML, or `rows` as a table."""
    if output in ("json", "yaml"):
        emit_document(document, output)
        return
    from rich.table import Table
    from rich.text import Text

    shown = [column for column in columns if output == "wide" or not column.wide]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in shown:
        table.add_column(column.title, overflow="fold")
    for row in rows:
        # Text, never markup: a job's name or error is shown as it is.
        table.add_row(*(Text(_cell(column.text(row))) for column in shown))
    stdout().print(table)


def emit_document(document: Any, output: Format = "json") -> None:
    """Exactly one JSON or YAML document on stdout."""
    clean = plain(document)
    if output == "yaml":
        import yaml

        sys.stdout.write(yaml.safe_dump(clean, sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(clean, indent=2, allow_nan=False) + "\n")


def note(text: str) -> None:
    """A line for people, on stderr, so that stdout stays parseable."""
    print(harmless(text), file=sys.stderr)


def harmless(text: str) -> str:
    """`text` without what a terminal would obey: whoever lists jobs reads words of other people's programs."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def stdout() -> Console:
    from rich.console import Console

    # A pipe has no width: wide enough that no cell is folded where a script would read it.
    return Console(highlight=False, width=None if sys.stdout.isatty() else 240)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else harmless(str(value))
