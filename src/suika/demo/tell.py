"""Writes what the demo found: result.json, a self-contained report.html, and a trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from suika.control.store import Event
from suika.core.job import Job
from suika.core.words import plain, seconds, size
from suika.demo.perfetto import write_trace
from suika.demo.picture import colours, losses_svg, timeline_svg
from suika.demo.result import BOUND, DemoResult
from suika.demo.scene import Steps
from suika.demo.timeline import Mark, timeline


def tell(
    result: DemoResult,
    jobs: Sequence[Job],
    steps: Steps,
    happened: Sequence[Event],
    marks: Sequence[Mark],
    out: Path,
) -> DemoResult:
    """The result with the names of its files, which are written into `out`."""
    names = {job.id: job.spec.name for job in jobs}
    line = timeline(happened, names, marks)
    files = {"report": out / "report.html", "trace": out / "trace.json", "result": out / "result.json"}
    result = replace(result, files={kind: str(path) for kind, path in files.items()})
    by_name = {names[job_id]: [step.loss for _, step in sorted(mine.items())] for job_id, mine in steps.items()}
    colour = colours(list(by_name))
    moved = {name: [move.cut_step for move in result.moves if move.job == name] for name in by_name}
    devices = sorted({span.device for span in line.spans})
    pictures = {
        "timeline": Markup(timeline_svg(line, devices, colour)),
        "losses": Markup(losses_svg(by_name, moved, colour)),
    }
    files["report"].write_text(_page(result, line.marks, colour, pictures))
    origin_s = happened[0].at_s
    tracks = {
        names[job_id]: [(s.at_s - origin_s, s.loss) for _, s in sorted(mine.items())] for job_id, mine in steps.items()
    }
    write_trace(files["trace"], line, tracks)
    files["result"].write_text(json.dumps(plain(result.to_dict()), indent=2, allow_nan=False) + "\n")
    return result


def write_events(happened: Sequence[Event], out: Path) -> None:
    """All events, one JSON object a line."""
    lines = (json.dumps(plain(event.to_dict()), allow_nan=False) + "\n" for event in happened)
    (out / "events.jsonl").write_text("".join(lines))


def _page(result: DemoResult, marks: Sequence[Mark], colour: Mapping[str, str], pictures: Mapping[str, Markup]) -> str:
    environment = Environment(loader=PackageLoader("suika.demo"), autoescape=select_autoescape(default=True))
    environment.filters |= {"seconds": seconds, "size": size}
    page = environment.get_template("report.html")
    return page.render(result=result, marks=marks, colour=colour, pictures=pictures, bound=BOUND)
