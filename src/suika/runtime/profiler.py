"""The online profiler: one step in N of each rank is taken apart; the rest costs nothing but a few empty spans.

The trainer marks its phases and messages with `span`. In a sampled step each span adds its seconds to a class:
processor seconds of this process on CPU devices (devices of one host share its cores, so wall time would measure the
neighbours), device seconds between events on GPUs. Spans nest: a class gets what its spans took without those inside.

N grows until all that profiling costs (every span counted, at a price measured in this process) is at most `BUDGET` of
the training time. The first steps of a generation are left out: they build caches, groups and memory.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from suika.core.sample import CollectiveSample, StepSample
from suika.runtime.program import StepResult

BUDGET = 0.005  # of step time
AXES = frozenset(("tp", "pp", "dp", "cp", "ep", "world"))  # spans of this name wait for peers
WARM_STEPS = 3  # of a generation, never sampled
EVERY = 4  # steps from one sample to the next, while the budget allows
STEADY = "steady"  # kind of a sample that is nothing but training
_IDLE = nullcontext()


class _Recording:
    """The spans of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.collectives: list[CollectiveSample] = []
        self.num_spans = 0
        self.waited_s = 0.0  # wall seconds in spans of an axis that carry no message: others have not sent yet
        self.inner: list[float] = [0.0]  # seconds of the spans inside each open one
        self.marks: list[tuple[str, Any, Any]] = []  # (class, start event, end event) on a GPU

    def add(self, name: str, seconds: float) -> None:
        own = seconds - self.inner.pop()
        self.inner[-1] += seconds
        self.seconds[name] = self.seconds.get(name, 0.0) + own

    def settle(self) -> None:
        """Wait for the device and add what its events say. A GPU's spans are flat: nested ones count in both."""
        if self.marks:
            torch.cuda.synchronize()
        for name, start, end in self.marks:
            self.seconds[name] = self.seconds.get(name, 0.0) + start.elapsed_time(end) / 1e3


_recording: _Recording | None = None  # of the step that the training thread is in


class _Span:
    """One timed span. `message`: what it carried, if it is a collective or a transfer."""

    def __init__(self, name: str, message: tuple[str, str, int, int] | None) -> None:
        self.name, self.message = name, message

    def __enter__(self) -> None:
        assert _recording is not None
        _recording.num_spans += 1
        _recording.inner.append(0.0)
        self.wall_s, self.start = time.perf_counter(), _now()

    def __exit__(self, *_: object) -> None:
        recording = _recording
        if recording is None:
            return
        end = _now()
        if isinstance(end, float):
            recording.add(self.name, end - self.start)
        else:
            recording.inner.pop()
            recording.marks.append((self.name, self.start, end))
        if self.message is not None:
            recording.collectives.append(CollectiveSample(*self.message, time.perf_counter() - self.wall_s))
        elif self.name in AXES:
            recording.waited_s += time.perf_counter() - self.wall_s


def _now() -> Any:
    """Processor seconds of this process, or an event on the current stream of its GPU."""
    if not torch.cuda.is_initialized():
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def span(name: str) -> AbstractContextManager[None]:
    """Mark a phase of a step: `with span("optimizer"): ...`."""
    return _IDLE if _recording is None else _Span(name, None)


def message(axis: str, op: str, num_bytes: int, group_size: int) -> AbstractContextManager[None]:
    """Mark a collective or transfer of `num_bytes` on `axis`."""
    return _IDLE if _recording is None else _Span(axis, (axis, op, num_bytes, group_size))


@cache
def span_cost_s() -> float:
    """What one recorded span costs in this process: the median of a few hundred."""
    global _recording
    before, _recording = _recording, _Recording()
    costs = []
    for _ in range(200):
        start = time.perf_counter()
        with message("probe", "probe", 0, 1):
            pass
        costs.append(time.perf_counter() - start)
    _recording = before
    return statistics.median(costs)


class Profiler:
    """Samples the steps of one rank in one generation."""

    def __init__(self, job_id: str, generation: int, rank: int, budget: float = BUDGET) -> None:
        self.job_id, self.generation, self.rank, self.budget = job_id, generation, rank, budget
        self.num_steps = 0
        self.profiler_s = self.trained_s = 0.0
        self._recent: deque[float] = deque(maxlen=32)
        self._next = WARM_STEPS

    def step(
        self, run: Callable[[], StepResult], beside: Callable[[], str] = lambda: STEADY
    ) -> tuple[StepResult, StepSample | None]:
        """Run one step; its sample, if it was one of the sampled ones. `beside` says what goes on at the moment beside
        training (move, snapshot), whose processor time the sample has in it: the sample's kind."""
        if self.num_steps < self._next:
            return self._plain(run), None
        return self._sampled(run, beside)

    def _plain(self, run: Callable[[], StepResult]) -> StepResult:
        start = time.perf_counter()
        result = run()
        self._count(time.perf_counter() - start)
        return result

    def _sampled(self, run: Callable[[], StepResult], beside: Callable[[], str]) -> tuple[StepResult, StepSample]:
        global _recording
        kind = beside()
        cost = span_cost_s()
        recording = _Recording()
        begun, processor = time.perf_counter(), time.process_time()
        _recording = recording
        try:
            result = run()
            recording.settle()
        finally:
            _recording = None
        step_s, used_s = time.perf_counter() - begun, time.process_time() - processor
        own_s = recording.num_spans * cost
        self.profiler_s += own_s
        self._count(step_s)
        self._plan_next(own_s)
        recording.seconds["rest"] = max(used_s - sum(recording.seconds.values()), 0.0)
        sample = StepSample(
            self.job_id,
            self.generation,
            result.step,
            self.rank,
            step_s,
            recording.seconds,
            tuple(recording.collectives),
            idle_s=max(step_s - used_s, 0.0),
            waited_s=recording.waited_s,
            profiler_s=own_s,
            kind=kind if kind != STEADY else beside(),
        )
        return result, sample

    def _count(self, step_s: float) -> None:
        self.num_steps += 1
        self.trained_s += step_s
        self._recent.append(step_s)

    def _plan_next(self, own_s: float) -> None:
        """The next sample comes when it, too, will be within the budget."""
        typical = statistics.median(self._recent)
        due_s = (self.profiler_s + own_s) / self.budget - self.trained_s
        self._next = self.num_steps + max(EVERY, math.ceil(due_s / typical) if due_s > 0 else 0)
