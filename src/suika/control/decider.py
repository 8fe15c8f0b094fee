"""Scheduling cycles in the process beside the controller, so that a decision does not keep the door from answering.

A cycle is a pure function of its snapshot. The process is given one, works, and gives back what may be done; whoever
asked waits meanwhile, and what happens in between is decided together in the next cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from suika.control.compute import ComputeProcess
from suika.core.decision import Decision, Reason
from suika.core.policy import Policy
from suika.core.snapshot import Snapshot
from suika.schedule.cycle import Step, run_cycle
from suika.schedule.policies import parse_policy

_ASKED_FOR = ("suika.control.decider", "suika.control.pricing")  # modules


class Decided(Protocol):
    """What of a `CycleResult` a driver needs."""

    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def rejected(self) -> tuple[tuple[Decision, Reason], ...]: ...
    @property
    def waits(self) -> Mapping[str, Reason]: ...


Decide = Callable[[Snapshot], Decided]


@dataclass(frozen=True)
class Answer:
    steps: tuple[Step, ...]
    rejected: tuple[tuple[Decision, Reason], ...]
    waits: Mapping[str, Reason]


def decide_here(policy: Policy) -> Decide:
    """Cycles on the caller's own thread."""
    return lambda snapshot: run_cycle(snapshot, policy)


class DecisionProcess(ComputeProcess):
    """A `Decide`."""

    def __init__(self, policy: str) -> None:
        self._policy = policy
        super().__init__(*_ASKED_FOR, type(_policy(policy)).__module__)  # an unknown name is the user's mistake

    def __call__(self, snapshot: Snapshot) -> Decided:
        """Raises `ComputeError`."""
        return self.compute_there(_decided, self._policy, snapshot)


@cache
def _policy(name: str) -> Policy:
    """One object per process: its caches stay warm."""
    return parse_policy(name)


def _decided(policy: str, snapshot: Snapshot) -> Answer:
    result = run_cycle(snapshot, _policy(policy))
    return Answer(result.steps, result.rejected, dict(result.waits))
