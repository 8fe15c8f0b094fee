"""A cluster of emulated devices: real controller, agents and store, as fast as sixty seconds in one."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from suika.bench import emulate
from suika.cli.inputs import read_cluster
from suika.control.client import NoControllerError, call
from suika.simulate.times import measured
from suika.simulate.trace import read_trace
from suika.simulate.workload import build

pytestmark = pytest.mark.fault


@pytest.mark.timeout(240)
def test_both_worlds_agree_on_completion_times(shared_data: Path) -> None:
    """The short form of `suika bench emulate`. Few jobs, and a machine that others use: agreement within a tenth."""
    rubick = shared_data / "rubick"
    found = emulate.run(
        rubick / "workload-base.csv",
        rubick / "iteration_times.csv",
        num_jobs=10,
        run_time="300:1200",
        load=2.0,
        speedup=30.0,  # what the service itself takes for a start counts thirty times
    )
    assert found["finished"] == found["jobs"] == 10
    assert found["avg_jct_s"]["difference"] == pytest.approx(0.0, abs=0.1), found


@pytest.mark.timeout(240)
def test_a_killed_controller_takes_emulated_jobs_back(shared_data: Path, tmp_path: Path) -> None:
    """Time goes on while nobody answers; no job starts twice, and the clock does not jump back."""
    rubick = shared_data / "rubick"
    models, times = measured(rubick / "iteration_times.csv"), rubick / "iteration_times.csv"
    trace = emulate.slice_of(read_trace(rubick / "workload-base.csv"), 4, "300:1200")
    jobs = build(trace, read_cluster("2x8:A800"), models).jobs
    with emulate.emulated(tmp_path, "2x8:A800", 60.0, times, "fifo") as home:
        socket = home / "controller.sock"
        data = home / "none"
        data.write_text("no data\n" * 1000)
        for job in jobs:
            call("submit", socket, job=emulate.job_file(job, models, data))
        _wait(lambda: any(row["steps_done"] > 5 for row in call("jobs", socket)))
        before = {row["name"]: row for row in call("jobs", socket)}
        os.kill(json.loads((home / "controller.json").read_text())["pid"], signal.SIGKILL)
        time.sleep(2.0)
        with emulate.emulated(tmp_path, "2x8:A800", 60.0, times, "fifo"):
            for name, row in before.items():
                if row["state"] == "running":
                    _wait(lambda name=name, row=row: _row(socket, name)["steps_done"] > row["steps_done"])
                    assert _row(socket, name)["generation"] == row["generation"]
                    assert _row(socket, name)["submitted_s"] == row["submitted_s"]
            _wait(lambda: not call("jobs", socket), 120.0)
            rows = call("jobs", socket, all=True)
            assert {row["state"] for row in rows} == {"finished"}
            assert len(rows) == len(jobs)


def _row(socket: Path, name: str) -> dict:
    return next(row for row in call("jobs", socket, all=True) if row["name"] == name)


def _wait(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except NoControllerError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
