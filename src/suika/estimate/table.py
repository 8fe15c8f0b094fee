"""A table of measured cases as text: its rows, and what one cell may hold. A blank is not a value."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suika.core.errors import SpecError

NEEDED = ("gpus", "layers", "hidden", "seq", "gbs")  # columns without which no row can be priced
NO, YES = ("", "none", "no", "0", "false", "off"), ("yes", "1", "true", "on")
_TOO_MANY, _TOO_FEW = "more values than columns", "fewer values than columns"


class SkipError(Exception):
    """This row cannot be priced; the message is the reason, the same for all rows like it."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, gzipped or not. Raises `SpecError` if it cannot be read as one."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        # utf-8-sig: a byte order mark is no part of the first column's name.
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, restkey=_TOO_MANY, restval=None)
            rows = [_cells(row) for row in table]
            names = [name.strip().lower() for name in table.fieldnames or ()]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise SpecError("cases", str(path), f"cannot be read: {error}", "give a CSV file, plain or gzipped") from None
    if not rows:
        raise SpecError("cases", str(path), "has no rows", "the first line names the columns")
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise SpecError("cases", str(path), f"names a column twice: {', '.join(twice)}", "keep one column of each name")
    missing = [name for name in NEEDED if name not in names]
    if missing:
        raise SpecError(
            "cases", str(path), f"lacks the columns {', '.join(missing)}", "use the columns of measured_dev.csv"
        )
    return rows


def _cells(row: Mapping[str | None, Any]) -> dict[str, str]:
    """The cells that have a column. `_TOO_MANY` or `_TOO_FEW` where values and columns do not match: then none can be
    trusted."""
    cells = {k.strip().lower(): v.strip() for k, v in row.items() if k and isinstance(v, str)}
    wrong = _TOO_MANY if _TOO_MANY in row else _TOO_FEW if None in row.values() else ""
    return cells | ({wrong: "yes"} if wrong else {})


def refuse_torn(row: Mapping[str, str]) -> None:
    """Raise for a row whose values and columns did not match."""
    for wrong in (_TOO_MANY, _TOO_FEW):
        if wrong in row:
            raise SkipError(f"not a row of this table: {wrong}")


def number(text: str) -> float | None:
    """A finite number, if `text` is one."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def whole(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A count; `default` where the cell is blank."""
    text = row.get(name, "")
    if not text:
        if default is None:
            raise SkipError(f"missing: {name}")
        return default
    value = number(text)
    if value is None or value != int(value):
        raise SkipError(f"not a whole number: {name}")
    if not 0 < value < 1e9:
        raise SkipError(f"out of range: {name}")
    return int(value)


def flag(row: Mapping[str, str], name: str) -> bool:
    text = row.get(name, "").lower()
    if text not in (*NO, *YES):
        raise SkipError(f"not a flag: {name}")
    return text in YES


def positive(row: Mapping[str, str], name: str) -> float | None:
    text = row.get(name, "")
    if not text:
        return None
    value = number(text)
    if value is None or value <= 0:
        raise SkipError(f"not a positive number: {name}")
    return value
