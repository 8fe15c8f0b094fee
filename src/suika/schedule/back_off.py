"""How long a job whose move failed is left alone before another is tried: the same in both worlds."""

from __future__ import annotations

BACK_OFF_S, MOST_BACK_OFF_S = 2.0, 600.0  # after the first failure; doubles with each


def back_off_s(failures: int) -> float:
    """Seconds for which a job is left alone after so many failures in a row, 1 or more."""
    return min(BACK_OFF_S * 2.0 ** min(failures - 1, 20), MOST_BACK_OFF_S)
