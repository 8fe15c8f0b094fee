"""What CSV readers share: rows with their line numbers, numbers and times that say what is wrong with them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime

from suika.core.errors import SpecError
from suika.simulate.trace import BadRowError, Row, TraceJob, lines

EMPTY = ("", "null", "none", "nan", "unknown", "\\n")


def csv_rows(text: str, job: Callable[[Mapping[str, str]], TraceJob | None], delimiter: str = ",") -> Iterator[Row]:
    """Each data row through `job`, which may raise `BadRowError`, or return None for a row that is no job of ours."""
    for line, row in csv_rows_of(text, delimiter):
        try:
            if row is None:
                raise BadRowError("has another number of columns than the header")
            found = job(row)
            if found is not None:
                yield line, found
        except BadRowError as bad:
            yield line, bad
        except KeyError as missing:
            yield line, BadRowError(f"has no column {missing.args[0]}")


def csv_rows_of(text: str, delimiter: str = ",") -> Iterator[tuple[int, Mapping[str, str] | None]]:
    """(line, cells by column) of each data row; None for one that does not fit the header."""
    reader = csv.DictReader(lines(text), delimiter=delimiter)
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error:  # e.g. a cell longer than any real one
            yield reader.line_num + 1, None
            continue
        fits = None not in row and None not in row.values()
        yield reader.line_num, {key.strip(): value.strip() for key, value in row.items()} if fits else None


def header(text: str) -> list[str]:
    return [name.strip() for name in text.split("\n", 1)[0].split(",")]


def number(row: Mapping[str, str], column: str) -> float:
    """The number in `column`; NaN, infinities and empty cells are bad."""
    value = row.get(column, "")
    if value.lower() in EMPTY:
        raise BadRowError(f"{column} is missing")
    try:
        found = float(value)
    except ValueError:
        raise BadRowError(f"{column}={value[:40]!r} is not a number") from None
    if found != found or found in (float("inf"), float("-inf")):
        raise BadRowError(f"{column}={value!r} is not finite")
    return found


def whole(row: Mapping[str, str], column: str) -> int:
    found = number(row, column)
    if found != int(found):
        raise BadRowError(f"{column}={found:g} is not a whole number")
    return int(found)


def optional(row: Mapping[str, str], column: str, default: float = 0.0) -> float:
    return default if row.get(column, "").lower() in EMPTY else number(row, column)


def optional_whole(row: Mapping[str, str], column: str) -> int:
    return 0 if row.get(column, "").lower() in EMPTY else whole(row, column)


def moment(row: Mapping[str, str], column: str, *formats: str) -> float:
    """Seconds since 1970 of the date in `column`; without a time zone it is read as UTC (only differences matter)."""
    value = row.get(column, "")
    if value.lower() in EMPTY:
        raise BadRowError(f"{column} is missing")
    try:
        found = datetime.fromisoformat(value)
    except ValueError:
        for pattern in formats:
            try:
                found = datetime.strptime(value, pattern)
                break
            except ValueError:
                continue
        else:
            raise BadRowError(f"{column}={value[:40]!r} is not a time") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def span(start_s: float, end_s: float) -> float:
    if end_s < start_s:
        raise BadRowError(f"ends {start_s - end_s:g} s before it starts")
    return end_s - start_s


def unit_s(columns: list[str], name: str, declared: str | None) -> tuple[str, float]:
    """(column, seconds per unit) of the time called `name`: its suffix says the unit, else the user must."""
    for suffix, factor in (("s", 1.0), ("ms", 1e-3)):
        if f"{name}_{suffix}" in columns:
            return f"{name}_{suffix}", factor
    bare = next((c for c in (name, f"{name}_time") if c in columns), None)
    if bare is None:
        raise SpecError("jobs", columns, f"no column {name}_s", f"name it {name}_s or {name}_ms")
    if declared is None:
        fix = f"give --time-unit s or ms, or name the column {name}_s or {name}_ms"
        raise SpecError("time-unit", bare, "the file does not say in which unit this column is", fix)
    return bare, 1.0 if declared == "s" else 1e-3
