"""The simulator: an agenda and a simulated clock around the scheduling cycle.

It is one of the two drivers of `run_cycle`, and knows no policy. Each turn:

    1. take    all events of the next instant
    2. apply   ends, settled moves, releases, repairs, failures, arrivals, a policy's own rounds
    3. check   the invariants
    4. decide  one cycle, if anything happened that a policy may answer
    5. begin   each step when the devices that it waits for are released; until then its job goes on as it was

A step pauses its job for the move's pause plus the decision's own time, with its new devices held. A job makes progress
at the true rate of its shape, and only while it holds devices and no move is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from suika.core.errors import SpecError
from suika.core.policy import Policy
from suika.schedule.cycle import CycleResult, run_cycle
from suika.simulate.agenda import RELEASED, ROUND
from suika.simulate.events import APPLY
from suika.simulate.live import NOTHING
from suika.simulate.state import State
from suika.simulate.steps import carry_out
from suika.simulate.world import Outcome, World

MOST_AGAIN = 4  # times that an unfinished cycle is asked again before something else must happen
MOST_IDLE = 10_000  # rounds in a row in which a policy lets all jobs wait


class Engine:
    """One simulation of one policy. `on_end` is told how many jobs are left, `on_cycle` sees each cycle's result."""

    def __init__(
        self,
        world: World,
        policy: Policy,
        *,
        on_end: Callable[[int], None] | None = None,
        on_cycle: Callable[[CycleResult], None] | None = None,
    ) -> None:
        self.policy, self.on_cycle = policy, on_cycle
        self.state = State(world, on_end)
        self._asked_again = self._idle_rounds = 0
        if policy.round_s > 0:
            self.state.agenda.enter(policy.round_s, ROUND, policy.round_s)

    def run(self) -> Outcome:
        """Until every job has ended. Raises `SpecError` if the policy leaves some waiting for ever."""
        while self.state.num_left:
            if not self._something_will_happen():
                raise self._stuck()
            self._turn()
        return self.state.outcome

    def run_until(self, at_s: float) -> None:
        """Up to and with everything that happens at `at_s`; then it is that time."""
        while self.state.num_left and self.state.agenda.is_due(at_s):
            self._turn()
        self.state.now_s = max(self.state.now_s, at_s)

    def _turn(self) -> None:
        """All of the next instant."""
        state = self.state
        state.now_s = state.agenda.next_s
        asks = [APPLY[kind](state, what) for kind, what in state.agenda.take(state.now_s)]
        state.check()
        if any(asks) and state.live:
            result = self._decide()
            released_s = carry_out(state, result.steps)
            self._ask_again(result, released_s.values())

    def _decide(self) -> CycleResult:
        snapshot, outcome = self.state.snapshot(), self.state.outcome
        started_s = time.process_time()
        result = run_cycle(snapshot, self.policy)
        outcome.decision_cpu_s.append(time.process_time() - started_s)
        outcome.num_rejected += len(result.rejected)
        if self.on_cycle is not None:
            self.on_cycle(result)
        return result

    def _ask_again(self, result: CycleResult, released_s: Collection[float]) -> None:
        """Where a circle of moves was broken, once all devices that this cycle gave up are released."""
        self._asked_again = self._asked_again + 1 if result.unfinished else 0
        if released_s and 0 < self._asked_again <= MOST_AGAIN:
            self.state.agenda.enter(max(released_s), RELEASED, NOTHING)

    def _something_will_happen(self) -> bool:
        """Whether time can still bring a change; of a policy's own rounds many idle ones may go by."""
        only_rounds = len(self.state.agenda) <= (self.policy.round_s > 0)
        self._idle_rounds = self._idle_rounds + 1 if only_rounds else 0
        return len(self.state.agenda) > 0 and self._idle_rounds < MOST_IDLE

    def _stuck(self) -> SpecError:
        waiting = [live.job.id for live in self.state.live.values()]
        some = ", ".join(waiting[:5]) + (", ..." if len(waiting) > 5 else "")
        fix = "look at one with --explain JOB@TIME, or take another policy"
        return SpecError("policy", self.policy.name, f"lets {self.state.num_left} jobs wait for ever: {some}", fix)
