"""The simulator: an event heap and a simulated clock around the scheduling cycle.

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

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from suika.core.cluster import Cluster
from suika.core.decision import Action
from suika.core.errors import SpecError
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.policy import Policy
from suika.core.quota import Quota
from suika.core.snapshot import JobView, MoveCost, Snapshot
from suika.plan.ordering import fabric
from suika.schedule.back_off import back_off_s
from suika.schedule.cycle import CycleResult, Step, run_cycle
from suika.simulate.charge import decision_s
from suika.simulate.jobs import Change, Record, SimJob
from suika.simulate.predictor import Predictor

# Kinds of events, in the order in which those of one instant are applied.
END, SETTLED, RELEASED, REPAIRED, HEALED, FAILED, SLOWED, ARRIVED, ROUND = range(9)
FREE, DOWN = -1, -2  # in `owner`
SEEN = 1.5  # times as long as its peers: less is not told apart from noise, as by the live profiler
MOST_AGAIN = 4  # times that an unfinished cycle is asked again before something else must happen
MOST_IDLE = 10_000  # rounds in a row in which a policy lets all jobs wait
NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Failure:
    """Node `node`, or only its device `index`, is gone from `at_s` for `down_s` seconds."""

    at_s: float
    node: str
    down_s: float
    index: int | None = None


@dataclass(frozen=True)
class Slowdown:
    """On node `node`, or only on its device `index`, steps take `times` as long from `at_s` on for `for_s` seconds."""

    at_s: float
    node: str
    for_s: float
    times: float
    index: int | None = None


@dataclass(frozen=True)
class World:
    """What is simulated, apart from the policy."""

    cluster: Cluster
    jobs: tuple[SimJob, ...]
    move_cost: MoveCost
    predictor: Predictor = field(default_factory=Predictor)
    failures: tuple[Failure, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    snapshot_every_s: float = 1800.0  # what a failure can cost a job, at most
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    interruptible: bool = False  # whether a job whose move is in flight may be sent elsewhere, at the full cost again
    failing_moves: float = 0.0  # share of the moves of running jobs that fail; their pause is lost
    seed: int = 0  # of which moves fail


@dataclass
class Outcome:
    """Records of all jobs (in order of submission), and of the decisions."""

    records: list[Record]
    decision_cpu_s: list[float] = field(default_factory=list)
    num_rejected: int = 0
    busy: list[tuple[float, int]] = field(default_factory=list)  # (time, devices held) at each change


@dataclass
class _Live:
    """A job in the system. While a move is in flight, `positions` and `layout` are already the new ones: the job goes
    on at `old_rate` until `begin_s`, stands still until `moving_until_s`, and goes on at `rate`."""

    number: int
    job: SimJob
    record: Record
    view: JobView
    done: float = 0.0
    touched_s: float = 0.0  # when `done` was brought up to date
    rate: float = 0.0  # true steps/s
    old_rate: float = 0.0
    begin_s: float = 0.0
    moving_until_s: float = 0.0
    left_alone_until_s: float = 0.0  # after failed moves
    num_tries: int = 0  # moves begun, failed ones included
    num_failed: int = 0  # of the last tries in a row
    positions: np.ndarray = field(default_factory=lambda: NOTHING)
    layout: Layout | None = None
    version: int = 0  # of what it holds; events of older versions are void
    last_change_s: float | None = None

    def done_at(self, now_s: float) -> float:
        before = max(min(now_s, self.begin_s) - self.touched_s, 0.0) * self.old_rate
        after = max(now_s - max(self.touched_s, self.moving_until_s), 0.0) * self.rate
        return self.done + before + after

    def end_s(self) -> float:
        """When it will have done all its steps, if nothing changes."""
        left = self.job.num_steps - self.done
        before = max(self.begin_s - self.touched_s, 0.0) * self.old_rate
        if before >= left:
            return self.touched_s + left / self.old_rate
        return max(self.touched_s, self.moving_until_s) + (left - before) / self.rate


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
        self.world, self.policy = world, policy
        self.on_end, self.on_cycle = on_end, on_cycle
        self.fabric = fabric(world.cluster)
        self.owner = np.full(self.fabric.num_devices, FREE, dtype=np.int64)  # job number, FREE or DOWN
        self.num_held = np.zeros(len(world.jobs), dtype=np.int64)  # what `owner` must add up to
        self.now_s = 0.0
        self.live: dict[int, _Live] = {}  # in order of submission
        self.number_of = {job.id: number for number, job in enumerate(world.jobs)}
        self.releasing: dict[int, float] = {}  # device number -> usable from that time on
        self.left_alone: set[int] = set()  # job numbers, after failed moves
        self.slowdowns: list[Slowdown] = []  # at present
        self.times = np.ones(self.fabric.num_devices)  # as long as a step takes on sound devices
        self.seen_slow: set[int] = set()  # devices that a job's samples have shown to be slow, until they are sound
        self.outcome = Outcome([Record(job) for job in world.jobs])
        self._num_left = len(world.jobs)
        self._asked_again = self._idle_rounds = 0
        self._heap: list[tuple[float, int, int, object]] = []
        self._sequence = itertools.count()
        for number, job in enumerate(world.jobs):
            self._push(job.submit_s, ARRIVED, number)
        for failure in world.failures:
            self._push(failure.at_s, FAILED, failure)
        for slowdown in world.slowdowns:
            self._push(slowdown.at_s, SLOWED, slowdown)
        if policy.round_s > 0:
            self._push(policy.round_s, ROUND, None)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every job has ended. Raises `SpecError` if the policy leaves some waiting for ever."""
        while self._num_left:
            if not self._something_will_happen():
                raise self._stuck()
            happened = self._apply_next()
            self._check()
            if happened and self.live:
                self._decide()
        return self.outcome

    def run_until(self, at_s: float) -> None:
        """Up to and with everything that happens at `at_s`; then it is that time."""
        while self._num_left and self._heap and self._heap[0][0] <= at_s:
            happened = self._apply_next()
            self._check()
            if happened and self.live:
                self._decide()
        self.now_s = max(self.now_s, at_s)

    def _something_will_happen(self) -> bool:
        """Whether time can still bring a change; of a policy's own rounds many idle ones may go by."""
        only_rounds = len(self._heap) <= (self.policy.round_s > 0)
        self._idle_rounds = self._idle_rounds + 1 if only_rounds else 0
        return bool(self._heap) and self._idle_rounds < MOST_IDLE

    def _stuck(self) -> SpecError:
        waiting = [live.job.id for live in self.live.values()]
        some = ", ".join(waiting[:5]) + (", ..." if len(waiting) > 5 else "")
        fix = "look at one with --explain JOB@TIME, or take another policy"
        return SpecError("policy", self.policy.name, f"lets {self._num_left} jobs wait for ever: {some}", fix)

    def _push(self, at_s: float, kind: int, what: object) -> None:
        heapq.heappush(self._heap, (at_s, kind, next(self._sequence), what))

    def _apply_next(self) -> bool:
        """Apply all events of the next instant; whether a policy should be asked."""
        self.now_s = self._heap[0][0]
        happened = False
        while self._heap and self._heap[0][0] <= self.now_s:
            _, kind, _, what = heapq.heappop(self._heap)
            happened |= self._HANDLERS[kind](self, what)
        return happened

    def _check(self) -> None:
        """No device has two owners or none that holds it; nobody makes progress without devices."""
        held = np.bincount(self.owner[self.owner >= 0], minlength=len(self.num_held))
        assert (held == self.num_held).all(), f"at {self.now_s}: owners and holders disagree"
        assert all(live.rate == 0.0 or self.num_held[n] for n, live in self.live.items())
        self.outcome.busy.append((self.now_s, int(held.sum())))

    # -- events --------------------------------------------------------------------------------------------------

    def _arrived(self, number: int) -> bool:
        record = self.outcome.records[number]
        job = record.job
        view = job.first_view(self.world.predictor.curve(job))
        self.live[number] = live = _Live(number, job, record, view, touched_s=self.now_s)
        self._refresh(live)
        return True

    def _ended(self, what: tuple[int, int]) -> bool:
        live = self._current(what)
        if live is None:
            return False
        self._touch(live)
        self._break_off(live)  # a move that had not begun
        due = live.job.num_steps
        assert abs(live.done - due) <= 1e-6 * max(due, 1.0), f"{live.job.id}: {live.done} of {due} steps"
        self._hold(live, NOTHING)
        live.record.end_s = self.now_s
        self.left_alone.discard(live.number)
        del self.live[live.number]
        self._num_left -= 1
        if self.on_end is not None:
            self.on_end(self._num_left)
        return True

    def _settled(self, what: tuple[int, int]) -> bool:
        live = self._current(what)
        if live is None:
            return False
        self._touch(live)
        self._refresh(live)
        # Where moves may be interrupted, its end makes nothing possible that was not before: nobody is asked.
        return not self.world.interruptible or live.left_alone_until_s == self.now_s

    def _released(self, positions: np.ndarray) -> bool:
        for position in positions.tolist():
            if self.releasing.get(position, self.now_s + 1) <= self.now_s:
                del self.releasing[position]
        return True

    def _failed(self, failure: Failure) -> bool:
        here = self._here(failure)
        for number in sorted({int(owner) for owner in self.owner[here] if owner >= 0}):
            self._lose(self.live[number])
        self.owner[here] = DOWN
        self._push(self.now_s + failure.down_s, REPAIRED, failure)
        return True

    def _repaired(self, failure: Failure) -> bool:
        self.owner[self._here(failure) & (self.owner == DOWN)] = FREE
        return True

    def _slowed(self, slowdown: Slowdown) -> bool:
        self.slowdowns.append(slowdown)
        self._push(self.now_s + slowdown.for_s, HEALED, slowdown)
        return self._paces_change(slowdown)

    def _healed(self, slowdown: Slowdown) -> bool:
        self.slowdowns.remove(slowdown)
        return self._paces_change(slowdown)

    def _paces_change(self, slowdown: Slowdown) -> bool:
        """Jobs on these devices go on at another pace, and their ends are others."""
        here = self._here(slowdown)
        self.times[here] = 1.0
        for other in self.slowdowns:
            there = here & self._here(other)
            self.times[there] = np.maximum(self.times[there], other.times)
        self.seen_slow -= set(np.flatnonzero(self.times < SEEN).tolist())
        for number in sorted({int(owner) for owner in self.owner[here] if owner >= 0}):
            live = self.live[number]
            self._touch(live)
            live.rate, live.version = self._true_rate(live), live.version + 1
            settled_s = max(live.moving_until_s, live.left_alone_until_s)
            if settled_s > self.now_s:
                self._push(settled_s, SETTLED, (number, live.version))
            self._push(live.end_s(), END, (number, live.version))
            self._refresh(live)
        return True

    def _here(self, what: Failure | Slowdown) -> np.ndarray:
        """[D] mask of the devices that it is about."""
        node = self.fabric.node_number[what.node]
        here: np.ndarray = self.fabric.node_of == node
        if what.index is not None:
            here = here & (np.arange(len(here)) == self.fabric.first[node] + what.index)
        return here

    def _round(self, _: object) -> bool:
        self._push(self.now_s + self.policy.round_s, ROUND, None)
        return True

    _HANDLERS: Mapping[int, Callable] = {
        END: _ended,
        SETTLED: _settled,
        RELEASED: _released,
        REPAIRED: _repaired,
        HEALED: _healed,
        FAILED: _failed,
        SLOWED: _slowed,
        ARRIVED: _arrived,
        ROUND: _round,
    }

    def _current(self, what: tuple[int, int]) -> _Live | None:
        """The job that an event is about, unless what it holds has changed since."""
        live = self.live.get(what[0])
        return live if live is not None and live.version == what[1] else None

    # -- decisions -----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        # Views that do not stay true as time passes.
        for number in self.live if self.world.predictor.drifts else sorted(self.left_alone):
            live = self.live[number]
            if live.rate and live.moving_until_s <= self.now_s:
                self._touch(live)
                self._refresh(live)
        devices = self.fabric.devices
        return Snapshot(
            self.now_s,
            self.world.cluster,
            tuple(live.view for live in self.live.values()),
            self.world.move_cost,
            down=frozenset(devices[p] for p in np.flatnonzero(self.owner == DOWN)),
            promised={devices[p]: at_s for p, at_s in self.releasing.items() if self.owner[p] == FREE},
            slow={devices[p]: float(self.times[p]) for p in sorted(self.seen_slow)},
            quotas=self.world.quotas,
        )

    def _decide(self) -> None:
        snapshot = self.snapshot()
        started = time.process_time()
        result = run_cycle(snapshot, self.policy)
        self.outcome.decision_cpu_s.append(time.process_time() - started)
        charge_s = decision_s(self.fabric.num_devices, len(self.live))
        self.outcome.num_rejected += len(result.rejected)
        if self.on_cycle is not None:
            self.on_cycle(result)
        released_s: dict[str, float] = {}
        void: set[str] = set()  # jobs that give up no devices after all
        for step in result.steps:
            job_id = step.decision.job_id
            if not void.isdisjoint(step.after):
                void.add(job_id)
            elif self._fails(step):
                self._fail(step, charge_s)
                void.add(job_id)
            else:
                self._begin(step, charge_s, released_s)
        self._asked_again = self._asked_again + 1 if result.unfinished else 0
        if released_s and 0 < self._asked_again <= MOST_AGAIN:
            self._push(max(released_s.values()), RELEASED, NOTHING)

    def _begin(self, step: Step, charge_s: float, released_s: dict[str, float]) -> None:
        """Carry a step out; `released_s` says from when on others may use what earlier steps of this cycle gave up."""
        decision = step.decision
        live = self.live[self.number_of[decision.job_id]]
        self._touch(live)
        self._break_off(live)
        live.num_tries, live.num_failed = live.num_tries + 1, 0
        move = self.world.move_cost(live.view, decision.layout, decision.devices)
        begin_s = max(self.now_s, step.not_before_s, *(released_s[job_id] for job_id in step.after))
        release_s = released_s[decision.job_id] = begin_s + move.release_s
        had_run, old = live.record.first_start_s is not None, len(live.positions)
        position = self.fabric.position
        positions = np.array([position[device] for device in decision.devices], dtype=np.int64)
        self._hold(live, positions, usable_s=release_s)
        live.layout, live.version = decision.layout, live.version + 1
        live.last_change_s = self.now_s
        if decision.action is Action.PREEMPT:
            live.old_rate = live.rate = 0.0
            live.begin_s = live.moving_until_s = self.now_s
        else:
            pause_s = move.pause_s + charge_s
            live.old_rate, live.rate = live.rate, self._true_rate(live)
            live.begin_s, live.moving_until_s = begin_s, begin_s + pause_s
            live.record.paused_s += pause_s
            live.record.paused_device_s += pause_s * len(positions)
            live.record.num_moves += decision.action is Action.REDEPLOY or live.view.has_state
            if live.record.first_start_s is None:
                live.record.first_start_s = begin_s
            self._push(live.moving_until_s, SETTLED, (live.number, live.version))
            self._push(live.end_s(), END, (live.number, live.version))
        if had_run:
            until_s = max(live.moving_until_s, live.begin_s)
            live.record.changes.append(
                Change(self.now_s, live.begin_s, until_s, old, len(positions), decision.reason.code)
            )
        self._refresh(live)

    def _fails(self, step: Step) -> bool:
        """Whether this try to move a running job fails: drawn from (seed, job, number of the try)."""
        share = self.world.failing_moves
        if not share or step.decision.action is not Action.REDEPLOY:
            return False
        number = self.number_of[step.decision.job_id]
        drawn = np.random.default_rng([self.world.seed, 20263, number, self.live[number].num_tries]).random()
        return bool(drawn < share)

    def _fail(self, step: Step, charge_s: float) -> None:
        """The job loses the pause of the move, goes on where it was, and is left alone for longer each time."""
        live = self.live[self.number_of[step.decision.job_id]]
        self._touch(live)
        self._break_off(live)
        move = self.world.move_cost(live.view, step.decision.layout, step.decision.devices)
        # What it was on its way to, if a move was in flight, it has yet to reach: that pause goes on.
        live.begin_s = self.now_s
        live.moving_until_s = max(live.moving_until_s, self.now_s + move.pause_s + charge_s)
        pause_s = live.moving_until_s - self.now_s
        live.old_rate = live.rate
        live.record.paused_s += pause_s
        live.record.paused_device_s += pause_s * len(live.positions)
        live.num_tries, live.num_failed = live.num_tries + 1, live.num_failed + 1
        live.record.failed_moves += 1
        live.left_alone_until_s = live.moving_until_s + back_off_s(live.num_failed)
        live.version += 1
        self.left_alone.add(live.number)
        self._push(live.left_alone_until_s, SETTLED, (live.number, live.version))
        self._push(live.end_s(), END, (live.number, live.version))
        self._refresh(live)

    def _true_rate(self, live: _Live) -> float:
        per_node = Counter(self.fabric.node_of[live.positions].tolist())
        shape = tuple(sorted(per_node.values(), reverse=True))
        assert live.layout is not None
        kinds = {self.world.cluster.nodes[node].device_type for node in per_node}
        assert len(kinds) == 1, f"{live.job.id} stands on devices of several types: {sorted(kinds)}"
        known = live.job.true_step_s
        step_s = known.get((shape, live.layout, kinds.pop()), known.get((shape, live.layout, "")))
        assert step_s is not None, f"{live.job.id}: {live.layout} on {shape} is not an option of it"
        return 1.0 / (step_s * float(self.times[live.positions].max()))

    # -- what a job holds ----------------------------------------------------------------------------------------

    def _touch(self, live: _Live) -> None:
        """Bring its progress and its account up to now."""
        live.done = min(live.done_at(self.now_s), live.job.num_steps)
        live.record.device_s += len(live.positions) * (self.now_s - live.touched_s)
        live.touched_s = self.now_s

    def _break_off(self, live: _Live) -> None:
        """Take what a move in flight will not take any more off its job's account."""
        rest_s = max(live.moving_until_s - max(self.now_s, live.begin_s), 0.0)
        live.record.paused_s -= rest_s
        live.record.paused_device_s -= rest_s * len(live.positions)
        if rest_s and live.record.changes:
            last = live.record.changes[-1]
            last.until_s = max(min(last.until_s, self.now_s), last.begin_s)

    def _hold(self, live: _Live, positions: np.ndarray, usable_s: float = 0.0) -> None:
        """Give the job exactly `positions`; others may use what it gives up from `usable_s` on."""
        gives_up = np.setdiff1d(live.positions, positions)
        self.owner[live.positions] = FREE
        taken = self.owner[positions] != FREE
        assert not taken.any(), f"{live.job.id} takes {self.fabric.devices[positions[taken][0]]}, which is not free"
        self.owner[positions] = live.number
        self.num_held[live.number] = len(positions)
        if len(live.positions):
            live.record.spans[-1] = (*live.record.spans[-1][:1], self.now_s, len(live.positions))
        if len(positions):
            live.record.spans.append((self.now_s, self.now_s, len(positions)))
        live.positions = positions
        if len(gives_up) and usable_s > self.now_s:
            live.record.device_s += len(gives_up) * (usable_s - self.now_s)
            self.releasing.update(dict.fromkeys(gives_up.tolist(), usable_s))
            self._push(usable_s, RELEASED, gives_up)

    def _lose(self, live: _Live) -> None:
        """A node under it is gone: it falls back to its last snapshot and waits for devices."""
        self._touch(live)
        self._break_off(live)
        running_s = max(self.now_s - live.moving_until_s, 0.0) if live.rate else 0.0
        lost = min(running_s % self.world.snapshot_every_s * live.rate, live.done)
        live.done -= lost
        live.record.lost_steps += lost
        self._hold(live, NOTHING)
        live.rate = live.old_rate = 0.0
        live.begin_s = live.moving_until_s = live.left_alone_until_s = self.now_s
        live.layout, live.version = None, live.version + 1
        self._refresh(live)

    def _refresh(self, live: _Live) -> None:
        """Show policies the job as it is now. The view stays true until something happens to the job."""
        moving = live.moving_until_s > self.now_s
        left_alone = live.left_alone_until_s > self.now_s
        if not left_alone:
            self.left_alone.discard(live.number)
        if not moving and live.rate:
            self.seen_slow.update(live.positions[self.times[live.positions] >= SEEN].tolist())
        holds = len(live.positions) > 0
        started = live.record.first_start_s is not None
        state = (JobState.REDEPLOYING if moving else JobState.RUNNING) if holds else JobState.QUEUED
        live.view = replace(
            live.view,
            state=state,
            remaining_steps=self.world.predictor.remaining_steps(live.job, live.done),
            done_steps=live.done,
            started_s=live.record.first_start_s,
            layout=live.layout,
            devices=tuple(self.fabric.devices[p] for p in live.positions.tolist()),
            observed_step_s=1.0 / live.rate if live.rate and not moving else None,
            moving_until_s=live.left_alone_until_s if left_alone else live.moving_until_s if moving else None,
            interruptible=moving and not left_alone and self.world.interruptible,
            attained_device_s=live.record.device_s,
            last_change_s=live.last_change_s,
            num_moves=live.record.num_moves,
            has_state=started,
            as_of_s=self.now_s,
        )
