"""Timeline, pictures, trace and result from events alone: no process is started here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.dom import minidom

import pytest

from suika.control.store import Event
from suika.core.cluster import Device
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.demo.perfetto import write_trace
from suika.demo.picture import colours, losses_svg, timeline_svg
from suika.demo.result import DemoResult, JobResult, MoveResult
from suika.demo.timeline import Mark, timeline
from suika.demo.twin import largest_difference


def plan(*devices: str, **axes: int) -> Plan:
    return Plan(Layout(**axes), Placement(tuple(Device.parse(device) for device in devices)))


TWO, ONE = plan("n0/0", "n0/1", dp=2), plan("n1/0")
HAPPENED = [
    Event(1, 100.0, "submitted", "j1"),
    Event(2, 101.0, "launched", "j1", {"plan": TWO.to_dict(), "generation": 1}),
    Event(3, 102.0, "node-draining", None, {"node": "n0"}),
    Event(4, 104.0, "committed", "j1", {"plan": ONE.to_dict(), "generation": 2}),
    Event(5, 109.0, "job-finished", "j1"),
    Event(6, 110.0, "launched", "j2", {"plan": TWO.to_dict(), "generation": 1}),
    Event(7, 112.0, "released", "j1", {"devices": []}),
]
NAMES = {"j1": "<b>one</b>", "j2": "two"}


def test_a_generation_is_one_span_per_device_until_the_next() -> None:
    line = timeline(HAPPENED, NAMES)
    spans = [(s.job, s.device, s.generation, s.start_s, s.stop_s) for s in line.spans]
    assert spans == [
        ("<b>one</b>", "n0/0", 1, 1.0, 4.0),
        ("<b>one</b>", "n0/1", 1, 1.0, 4.0),
        ("<b>one</b>", "n1/0", 2, 4.0, 9.0),
        ("two", "n0/0", 1, 10.0, 12.0),  # open at the end
        ("two", "n0/1", 1, 10.0, 12.0),
    ]


def test_pictures_are_well_formed_and_show_text_as_text() -> None:
    line = timeline(HAPPENED, NAMES, [Mark(2.0, "<script>alert(1)</script>")])
    colour = colours(list(NAMES.values()))
    drawn = timeline_svg(line, ["n0/0", "n0/1", "n1/0"], colour)
    assert len(minidom.parseString(drawn).getElementsByTagName("g")) == 6
    assert "<script>" not in drawn
    assert "<b>" not in drawn
    losses = losses_svg({"<b>one</b>": [5.0, 4.0, 3.5], "two": []}, {"<b>one</b>": [2, 99]}, colour)
    assert len(minidom.parseString(losses).getElementsByTagName("circle")) == 1


def test_the_trace_has_a_track_per_device_in_microseconds(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", timeline(HAPPENED, NAMES), {"two": [(10.5, 4.0)]})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert (spans[0]["ts"], spans[0]["dur"]) == (1e6, 3e6)
    assert {(event["pid"], event["tid"]) for event in spans} == {(1, 0), (1, 1), (2, 0)}
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"loss": 4.0}]


@pytest.mark.parametrize(
    ("old", "new", "kinds"),
    [
        (TWO, ONE, ("shrink", "disjoint")),
        (ONE, TWO, ("grow", "disjoint")),
        (TWO, plan("n0/0", "n0/1", pp=2), ("relayout",)),
        (TWO, plan("n1/0", "n1/1", dp=2), ("disjoint",)),
        (TWO, Plan(Layout(pp=2, layers_per_stage=(3, 2)), TWO.placement), ("relayout", "uneven stages")),
        (plan("n0/0", "n0/1", "n0/2", "n0/3", dp=4), plan("n0/0", "n0/1", "n0/2", dp=3), ("shrink", "dp=3")),
    ],
)
def test_kinds_of_moves(old: Plan, new: Plan, kinds: tuple[str, ...]) -> None:
    assert move(old, new).kinds == kinds


def move(old: Plan, new: Plan) -> MoveResult:
    return MoveResult("one", old, new, "user", "why", 7, 10, 10, 0.1, 0.5, 4.0)


def test_ok_needs_every_job_every_move_and_every_loss() -> None:
    def result(difference: float = 1e-12, finished: bool = True, problems: tuple[str, ...] = ()) -> DemoResult:
        return DemoResult((JobResult("one", 9, 3.0, 8.0, finished, difference),), (move(TWO, ONE),), problems, 9.0)

    assert result().ok
    assert not result(difference=2e-9).ok
    assert not result(difference=math.inf).ok
    assert not result(finished=False).ok
    assert not result(problems=("move-failed: x",)).ok


def test_a_step_that_is_missing_on_either_side_is_no_agreement() -> None:
    losses = {1: 3.0, 2: 2.5, 3: 2.0}
    assert largest_difference(losses, losses | {3: 2.25}, 3) == 0.25
    assert largest_difference(losses, {1: 3.0, 2: 2.5}, 3) == math.inf
    assert largest_difference({1: 3.0, 3: 2.0}, losses, 3) == math.inf
