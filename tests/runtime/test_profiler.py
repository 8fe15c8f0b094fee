"""The profiler: classes add up, collectives are seen, nothing is lost when off, and its cost is within the budget."""

from __future__ import annotations

import time

import pytest

from suika.core.sample import StepSample
from suika.runtime import profiler
from suika.runtime.profiler import EVERY, WARM_STEPS, Profiler, message, span
from suika.runtime.program import StepResult


def busy(seconds: float) -> None:
    """Use this much processor time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def step(messages: int = 2) -> StepResult:
    with span("compute"):
        busy(0.004)
        for _ in range(messages):
            with message("tp", "swap", 1024, 2):
                busy(0.002)
    with span("optimizer"):
        busy(0.002)
    busy(0.001)
    return StepResult(step.done, 0.0, 0.0, 0.0, 1, ())  # type: ignore[attr-defined]


step.done = 0  # type: ignore[attr-defined]


def samples(p: Profiler, num_steps: int, messages: int = 2) -> list[StepSample]:
    found = []
    for _ in range(num_steps):
        step.done += 1  # type: ignore[attr-defined]
        _, sample = p.step(lambda: step(messages))
        if sample is not None:
            found.append(sample)
    return found


def test_classes_are_exclusive_and_add_up() -> None:
    (sample,) = samples(Profiler("j", 1, 3), WARM_STEPS + 1)
    assert sample.op_s["compute"] == pytest.approx(0.004, rel=0.4)
    assert sample.op_s["tp"] == pytest.approx(0.004, rel=0.4)
    assert sample.op_s["optimizer"] == pytest.approx(0.002, rel=0.4)
    assert sample.op_s["rest"] == pytest.approx(0.001, rel=0.9)
    assert sum(sample.op_s.values()) <= sample.step_s * 1.1
    assert [(c.axis, c.message_bytes, c.group_size) for c in sample.collectives] == [("tp", 1024, 2)] * 2
    assert (sample.rank, sample.generation, sample.kind) == (3, 1, "steady")


def test_the_first_steps_are_not_sampled_and_the_first_sample_is_soon() -> None:
    assert samples(Profiler("j", 1, 0), WARM_STEPS) == []
    assert len(samples(Profiler("j", 1, 0), WARM_STEPS + 2 + EVERY)) == 2  # well within 50 steps


def test_cost_stays_within_the_budget_and_n_grows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    frugal = Profiler("j", 1, 0)
    often = samples(frugal, 40, messages=1)
    assert frugal.profiler_s <= frugal.budget * frugal.trained_s
    dear = Profiler("j", 1, 0)
    # A share of a step, whatever a step takes on a busy machine: a sample costs what 30 steps may.
    cost_s = 0.05 * frugal.trained_s / frugal.num_steps
    monkeypatch.setattr(profiler, "span_cost_s", lambda: cost_s)
    seldom = samples(dear, 40, messages=1)
    assert len(seldom) < len(often)
    assert dear.profiler_s <= dear.budget * dear.trained_s + 2 * seldom[0].profiler_s


def test_spans_cost_nothing_while_no_step_is_sampled() -> None:
    began = time.process_time()
    for _ in range(10_000):
        with span("x"):
            pass
    assert (time.process_time() - began) / 10_000 < 5e-6


def test_what_goes_on_beside_training_marks_the_sample() -> None:
    """A move that is prepared, or a snapshot that is written, uses the same process: such a sample is not steady."""
    p = Profiler("j", 1, 0)
    samples(p, WARM_STEPS)
    step.done += 1  # type: ignore[attr-defined]
    _, moved = p.step(step, lambda: "move")
    assert moved is not None
    assert moved.kind == "move"
    began = iter(["steady", "snapshot"])
    p._next = 0
    _, saved = p.step(step, lambda: next(began))
    assert saved is not None
    assert saved.kind == "snapshot"


def test_a_failing_step_leaves_no_recording_behind() -> None:
    p = Profiler("j", 1, 0)
    samples(p, WARM_STEPS)
    with pytest.raises(FloatingPointError):
        p.step(fail)
    assert profiler._recording is None


def fail() -> StepResult:
    raise FloatingPointError("not finite")
