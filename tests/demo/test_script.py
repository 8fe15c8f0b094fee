"""The demo's story holds on fast and on slow machines: the scheduler's own moves do not hang on a lucky step time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from suika.control.pricing import EstimatedPricing
from suika.core.cluster import parse_cluster_shorthand
from suika.core.job import JobSpec, JobState, parse_job
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Snapshot
from suika.demo.predictions import Predictions
from suika.demo.script import CLUSTER, events, gpt, llama, small
from suika.estimate.calibrate import Calibration
from suika.estimate.knowledge import Known
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load

CLUSTER_ = parse_cluster_shorthand(CLUSTER)
PRICING = EstimatedPricing(CLUSTER_)
LLAMA, GPT = parse_job(llama(Path("/text"))), parse_job(gpt(Path("/text")))


def at_pace(slowdown: float) -> tuple[Known, ...]:
    return (Known.nothing(Calibration.prior("cpu")).paced(slowdown),)


def running(spec: JobSpec, slowdown: float, num: int, left: int, first: int = 0) -> JobView:
    curve = PRICING.curve(spec, at_pace(slowdown))
    option = next(option for option in curve.options if option.num_devices == num)
    devices = CLUSTER_.devices[first : first + num]
    done, low, high = spec.steps - left, spec.devices.min, spec.devices.max
    view = JobView(spec.name, JobState.RUNNING, 0.0, left, done, curve, low, high, started_s=1.0, layout=option.layout)
    return replace(view, devices=devices, observed_step_s=option.step_s)


def decided(*jobs: JobView) -> list[tuple[str, str, int]]:
    move_cost = PRICING.move_cost({"llama": LLAMA, "gpt": GPT})
    result = run_cycle(Snapshot(6.0, CLUSTER_, jobs, move_cost), load("suika"))
    return [(d.job_id, str(d.action), len(d.devices)) for d in result.decisions]


@pytest.mark.parametrize("slowdown", [2, 4, 8, 20, 100])
def test_the_schedulers_own_moves(slowdown: float) -> None:
    """`slowdown`: measured over estimated step time; about 8 on two idle cores, 40 on a crowded machine."""
    grown = decided(running(LLAMA, slowdown, 4, left=110, first=4))
    assert grown == [("llama", "redeploy", 8)]
    curve = PRICING.curve(GPT, at_pace(slowdown))
    arrived = JobView("gpt", JobState.QUEUED, 5.0, GPT.steps, 0, curve, GPT.devices.min, GPT.devices.max)
    made_room = decided(running(LLAMA, slowdown, 8, left=95), arrived)
    assert made_room == [("llama", "redeploy", 4), ("gpt", "start", 4)]
    beside = running(LLAMA, slowdown, 4, left=60, first=4)
    assert ("gpt", "redeploy", 4) in decided(beside, running(GPT, slowdown, 3, left=25))


def test_predicted_stands_beside_measured_and_foretold() -> None:
    """The rows of `ps` as a job starts, is measured, moves and is measured again; a start says nothing of a step."""
    here, there = (Layout(dp=n).resolve(LLAMA.model).to_dict() for n in (4, 8))

    def row(layout: dict[str, object], state: str, step_s: float | None, predicted_s: float) -> dict[str, object]:
        return {"name": "llama", "layout": layout, "state": state, "step_s": step_s, "predicted_step_s": predicted_s}

    seen = Predictions()
    told = (
        row(here, "starting", None, 0.9),
        row(here, "running", 0.2, 0.18),
        row(there, "redeploying", None, 0.11),
        row(there, "running", None, 0.11),
        row(there, "running", 0.1, 0.105),
    )
    for each in told:
        seen.note([each])
    first, second = seen.found()
    assert (first.measured_step_s, first.predicted_step_s, first.foretold_step_s) == (0.2, 0.18, None)
    assert (second.measured_step_s, second.predicted_step_s, second.foretold_step_s) == (0.1, 0.105, 0.11)
    assert second.to_dict()["layout"] == there


def test_the_script_only_tells_events() -> None:
    """Arrivals, a drain, users' wishes: nothing in it places or moves a job."""
    story = events(Path("/text"))
    assert {event.call for event in story} == {"submit", "resize", "drain"}
    assert sum(event.call == "submit" for event in story) == 3
    for job in (llama, gpt, small):
        assert parse_job(job(Path("/text"))).precision == "fp64"
    assert {parse_job(job(Path("/text"))).model.family for job in (llama, gpt)} == {"llama", "gpt"}
    assert GPT.global_batch % 3 != 0
