"""What the controller knows: the durable store, and what is only seen (a `Watch` per live job, lost devices)."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from suika.control.learned import Learned, Window
from suika.control.store import Event, News, Store
from suika.control.stragglers import Stragglers
from suika.core.cluster import Cluster, Device
from suika.core.decision import Decision, Reason
from suika.core.job import Job, JobState
from suika.core.plan import Plan
from suika.core.quota import Quota
from suika.core.snapshot import JobView
from suika.runtime.command_run import CommandRun
from suika.runtime.coordinator import JobRun
from suika.runtime.rooms import Rooms

Clock = Callable[[], float]
Run = JobRun | CommandRun
STEPS_TO_TRUST = 5  # step times seen before their median counts as a measurement


@dataclass
class Watch:
    """What is seen of one job. Lost with this process and seen again after: nothing here is a promise."""

    run: Run | None = None
    loss: float | None = None  # of the latest step; None: not a number
    # (steps done, when) as reported in the present generation; a fast job may report only some of its steps
    steps_seen: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=21))
    samples: Window = field(default_factory=Window)  # of the present generation
    stragglers: Stragglers = field(default_factory=Stragglers)  # of the present generation
    held: tuple[Device, ...] = ()
    held_since_s: float = 0.0
    attained_device_s: float = 0.0
    last_change_s: float | None = None
    busy_until_s: float = 0.0  # predicted end of the start, move or preemption in flight
    hold_until_s: float = 0.0  # after a failed move: left alone until then
    failed_moves: int = 0
    void_move: int | None = None  # the generation of one that an earlier controller did not commit: it is called off
    snapshot: str | None = None  # the newest complete one
    launch_s: float = 2.0  # of its latest start
    copies: Mapping[str, Any] | None = None  # in memory, the newest, and what is not well with them

    @property
    def step_s(self) -> float | None:
        """Median of the latest steps' times in this generation; None until enough were seen. From any thread."""
        seen = pairwise(tuple(self.steps_seen))  # a copy: the controller's thread appends meanwhile
        gaps = [(later_s - earlier_s) / (b - a) for (a, earlier_s), (b, later_s) in seen if b > a]
        return statistics.median(gaps) if len(gaps) >= STEPS_TO_TRUST else None


@dataclass
class Waiting:
    """A decision that is adopted but waits until other jobs have given up devices."""

    decision: Decision
    plan: Plan | None
    after: set[str]
    expected_s: float


@dataclass
class State:
    """Written by the controller's loop alone, except for a move's commit (a compare-and-set in the store). Others read
    `seen`, and copy what holds more than one thing before they look at it."""

    cluster: Cluster
    store: Store
    clock: Clock
    watches: dict[str, Watch] = field(default_factory=dict)
    waiting: list[Waiting] = field(default_factory=list)
    releasing: dict[Device, float] = field(default_factory=dict)  # given up, not free yet: predicted time
    down: dict[Device, float] = field(default_factory=dict)  # lost or dirty: until when
    quotas: Mapping[str, Quota] = field(default_factory=dict)  # by tenant; absent: borrows, no maximum
    changed: bool = True  # something happened that the policy should look at
    resting: dict[str, tuple[tuple[Any, ...], JobView]] = field(default_factory=dict)  # views that stay true, and why
    rooms: Rooms = field(default_factory=lambda: Rooms(dict))  # of copies in nodes' memory
    learned: Learned = field(init=False)  # what running jobs have taught the estimator

    def __post_init__(self) -> None:
        self.learned = Learned(self.store)

    def watch(self, job_id: str) -> Watch:
        """Of the loop alone: it begins one for a job that has none."""
        found = self.watches.get(job_id)
        return found if found is not None else self.watches.setdefault(job_id, Watch())

    def seen(self, job_id: str) -> Watch:
        """What is seen of a job, for other threads: the loop may be going through all watches right now."""
        return self.watches.get(job_id) or Watch()

    def keep_copies_in(self, rooms: Rooms) -> None:
        """Jobs' processes are on nodes with these; none is asked to keep copies while it is being emptied."""
        self.rooms, rooms.avoided = rooms, self.store.draining

    def active(self) -> tuple[Job, ...]:
        return self.store.active()

    def look_again(self) -> None:
        """Have the policy decide in the next round."""
        self.changed = True

    def limit(self, quotas: Mapping[str, Quota]) -> None:
        """What each tenant is guaranteed and may hold, from the next decision on."""
        self.quotas, self.changed = dict(quotas), True

    def log(self, kind: str, job_id: str | None = None, **data: Any) -> Event:
        return self.store.append(self.clock(), kind, job_id, **data)

    def change(self, job: Job, state: JobState, reason: Reason, **changes: Any) -> Job:
        """One edge of the transition table: the record, and with it the event that tells of it."""
        after = job.to(state, reason, **changes)
        data = {"reason": reason.code, "sentence": reason.sentence, "generation": after.generation}
        self.store.put(after, News(self.clock(), f"job-{state}", data))
        return after

    def hold(self, job_id: str, devices: Iterable[Device]) -> None:
        """Book the device-seconds of what the job held so far; it holds `devices` from now on."""
        watch, now = self.watch(job_id), self.clock()
        watch.attained_device_s += len(watch.held) * (now - watch.held_since_s)
        watch.held, watch.held_since_s, watch.last_change_s = tuple(devices), now, now

    def give_up(self, devices: Iterable[Device], expected_s: float) -> None:
        """`devices` are on their way to being free; nobody may start on them before `freed`."""
        self.releasing.update(dict.fromkeys(devices, expected_s))

    def freed(self, devices: Iterable[Device]) -> None:
        for device in devices:
            self.releasing.pop(device, None)
        self.changed = True
