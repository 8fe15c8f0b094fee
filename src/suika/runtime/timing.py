"""Step times of a job across generations, and the pause of a move by its definition."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from itertools import pairwise

STEPS_FOR_A_MEDIAN = 5
KEPT = 1024  # of the latest reports; a job may make millions of steps


@dataclass
class StepTimes:
    """Ends of one generation's optimizer steps in seconds, as the coordinator heard of them on its monotonic clock."""

    ends_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)  # steps done then; by default none is left out

    def __post_init__(self) -> None:
        self.steps = self.steps or list(range(len(self.ends_s)))

    def ended(self, step: int, at_s: float) -> None:
        self.steps.append(step)
        self.ends_s.append(at_s)
        if len(self.steps) > 2 * KEPT:  # the first one tells when training went on; of older ones every other will do
            del self.steps[1:-KEPT:2], self.ends_s[1:-KEPT:2]

    @property
    def latest_s(self) -> float:
        """Seconds between the two latest reports; 0 before there are two."""
        return self.ends_s[-1] - self.ends_s[-2] if len(self.ends_s) > 1 else 0.0

    @property
    def intervals_s(self) -> list[float]:
        """Seconds per step between reports."""
        seen = list(zip(self.steps, self.ends_s, strict=True))
        return [(after_s - before_s) / (b - a) for (a, before_s), (b, after_s) in pairwise(seen) if b > a]

    @property
    def median_s(self) -> float | None:
        """Median step, the first one (which has no start of its own) left out."""
        intervals_s = self.intervals_s
        return statistics.median(intervals_s) if intervals_s else None

    @property
    def settled(self) -> bool:
        return len(self.ends_s) > STEPS_FOR_A_MEDIAN


def pause_s(old: StepTimes, new: StepTimes) -> float | None:
    """(end of the first new step - end of the last old one) - the new layout's median step, at least 0, since a first
    step may be shorter than the median one. None: not known yet."""
    if not old.ends_s or new.median_s is None:
        return None
    return max(0.0, new.ends_s[0] - old.ends_s[-1] - new.median_s)


def lost_s(times: StepTimes, since_s: float) -> float:
    """Training time lost after `since_s`: the steps that ended since then against the median of those before."""
    num_before = sum(t <= since_s for t in times.ends_s)
    usual = StepTimes(times.ends_s[:num_before], times.steps[:num_before]).median_s
    if usual is None or num_before == len(times.ends_s):
        return 0.0
    start_s, first = times.ends_s[num_before - 1], times.steps[num_before - 1]
    return max(0.0, times.ends_s[-1] - start_s - usual * (times.steps[-1] - first))
