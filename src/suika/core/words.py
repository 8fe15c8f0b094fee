"""How numbers are said to people, and how values are made plain for JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from suika.core.errors import SpecError


def plain(value: Any) -> Any:
    """`value` with every NaN or infinity as null and every mapping or sequence as a plain one."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def seconds(value: float | None) -> str:
    """A duration for people: 0.34s, 12.3s, 4m05s, 2h10m."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.2f}s" if value < 10 else f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}m{rest:02}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}m"


def size(num_bytes: float | None) -> str:
    """Bytes for people, in powers of 1024."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def parse_seconds(text: str, field: str) -> float:
    """`90`, `90s`, `10m`, `2h` or `1d` in seconds; raises `SpecError`."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,6})?)([smhd]?)", text)
    if match is None:
        raise SpecError(field, text, "is no length of time", "write e.g. 90s, 10m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
