"""Step times of a job across generations, and the pause of a move by its definition."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

STEPS_FOR_A_MEDIAN = 5


@dataclass
class StepTimes:
    """Ends of one generation's optimizer steps in seconds, as the coordinator heard of them on its monotonic clock."""

    ends_s: list[float] = field(default_factory=list)

    @property
    def intervals_s(self) -> list[float]:
        return [b - a for a, b in zip(self.ends_s, self.ends_s[1:], strict=False)]

    @property
    def median_s(self) -> float | None:
        """Median step, the first one (which has no start of its own) left out."""
        return statistics.median(self.intervals_s) if len(self.ends_s) > 1 else None

    @property
    def settled(self) -> bool:
        return len(self.ends_s) > STEPS_FOR_A_MEDIAN


def pause_s(old: StepTimes, new: StepTimes) -> float | None:
    """(end of the first new step - end of the last old one) - the new layout's median step; None: not known yet."""
    if not old.ends_s or new.median_s is None:
        return None
    return new.ends_s[0] - old.ends_s[-1] - new.median_s


def lost_s(times: StepTimes, since_s: float) -> float:
    """Training time lost after `since_s`: the steps that ended since then against the median of those before."""
    before = [t for t in times.ends_s if t <= since_s]
    usual = StepTimes(before).median_s
    after = [t for t in times.ends_s if t > since_s]
    if usual is None or not after:
        return 0.0
    start = before[-1]
    return max(0.0, after[-1] - start - usual * len(after))
