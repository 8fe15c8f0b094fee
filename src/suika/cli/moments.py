"""Times as people say them on a command line."""

from __future__ import annotations

import re
from datetime import datetime

from suika.core.errors import SpecError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_JUST_NOW_S = 1e-6


def moment(text: str | None, field: str) -> float | None:
    """Seconds since the epoch; below 0: so long ago by the controller's clock, which may not be ours."""
    if text is None:
        return None
    if ago := re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([smhd])", text):
        return -max(float(ago[1]) * _UNITS[ago[2]], _JUST_NOW_S)
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise SpecError(field, text, "is no time", "write 2026-01-31, 2026-01-31T12:00 or 12h") from None
