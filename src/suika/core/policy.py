"""`Policy`: a pure, deterministic function from a snapshot to decisions."""

from __future__ import annotations

from typing import Protocol

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot


class Policy(Protocol):
    """No I/O, no wall clock, no unseeded randomness; every tie has a written key. Searches stop at an evaluation
    budget, not at a time. Derived state may be cached by snapshot contents, never change an answer."""

    name: str
    round_s: float  # ask again after so many seconds though nothing happened; 0: only when something does

    def decide(self, snapshot: Snapshot) -> list[Decision]: ...
