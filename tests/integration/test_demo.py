"""`suika demo` as a user runs it: its promise in JSON, its files, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(420)

KINDS = {"grow", "shrink", "relayout", "disjoint", "uneven stages", "dp=3"}


def start_demo(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "suika.cli", "demo", "--json", "--out", str(out), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.fault  # three quarters of a minute; make test-faults runs it
def test_the_demo_keeps_its_promise(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("argparse.py", "ast.py", "typing.py"):
        (text / name).write_text((Path(os.__file__).parent / name).read_text())
    demo = start_demo(tmp_path / "out", "--no-rivals", "--data", str(text))
    stdout, stderr = demo.communicate(timeout=400)
    assert demo.returncode == 0, stderr
    told = json.loads(stdout)
    assert told["ok"] is True
    assert told["max_abs_loss_diff"] <= 1e-9
    assert {job["name"]: job["steps"] for job in told["jobs"]} == {"llama": 130, "gpt": 64, "small": 12}
    assert all(job["final_loss"] < 5.5 and job["jct_s"] > 0 for job in told["jobs"])  # a blind guess: ln 257 = 5.55

    moves = told["redeployments"]
    assert len(moves) >= 6
    assert {kind for move in moves for kind in move["kinds"]} >= KINDS
    for move in moves:
        assert 0 < move["moved_bytes"] <= 1.02 * move["bound_bytes"]
        assert move["pause_s"] is not None
        ranks = [move[side]["tp"] * move[side]["pp"] * move[side]["dp"] for side in ("old", "new")]
        assert ranks == [len(move["old_devices"]), len(move["new_devices"])]
    # Over all three axes at once, and in both directions.
    assert any(all(m["old"][axis] != m["new"][axis] for axis in ("tp", "pp", "dp")) for m in moves)
    assert {m["reason"] for m in moves} >= {"user", "drain", "grow", "shrink"}

    predictions = [p for p in told["predictions"] if p["job"] == "llama"]
    assert predictions
    assert all(p["measured_step_s"] > 0 and p["predicted_step_s"] > 0 for p in predictions)
    assert any(p["foretold_step_s"] is not None for p in predictions)

    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert not re.search(r"(src|href)\s*=|https?://|<script|@import|url\(", page)
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    spans = [event for event in trace if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"llama", "gpt", "small"}
    by_device: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in spans:
        by_device.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for intervals in by_device.values():  # a device never has two owners
        ordered = sorted(intervals)
        assert all(stop <= start + 1 for (_, stop), (start, _) in pairwise(ordered))
    events = [json.loads(line) for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines()]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert sum(event["kind"] == "committed" for event in events) == len(moves)
    assert not list((tmp_path / "out").glob(".work-*"))


@pytest.mark.parametrize("signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.fault)])
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, signal_number: int) -> None:
    shared_before = set(os.listdir("/dev/shm"))
    demo = start_demo(tmp_path / "out")
    family: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and demo.poll() is None:
        family |= {child.pid: child for child in psutil.Process(demo.pid).children(recursive=True)}
        if len(family) >= 10:  # the fork server, a store, eight ranks
            break
        time.sleep(0.05)
    assert len(family) >= 10, "the first job never came up"
    time.sleep(1.0)
    demo.send_signal(signal_number)
    stdout, stderr = demo.communicate(timeout=60)
    assert demo.returncode == 130, stderr
    assert stdout == ""
    assert "interrupted" in stderr
    assert str(tmp_path / "out") in stderr
    assert "Traceback" not in stderr
    left = [process for process in family.values() if process.is_running() and process.status() != "zombie"]
    assert left == []
    assert not list((tmp_path / "out").glob(".work-*"))
    mine = {name for name in set(os.listdir("/dev/shm")) - shared_before if (Path("/dev/shm") / name).exists()}
    assert not [name for name in mine if "suika-restart" in name]


def test_what_cannot_be_read_or_written_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("short")
    wrong = [
        (["--data", str(tmp_path / "nothing")], tmp_path / "out", "does not exist"),
        (["--data", str(tmp_path / "short")], tmp_path / "out", "more than 64"),
        ([], tmp_path / "short" / "out", "cannot be made"),
    ]
    for options, out, why in wrong:
        demo = start_demo(out, *options)
        stdout, stderr = demo.communicate(timeout=60)
        assert demo.returncode == 2
        assert stdout == ""
        assert why in stderr
        assert "Traceback" not in stderr
