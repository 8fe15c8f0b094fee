"""`suika simulate` from the outside: its JSON contract, its report, what it refuses; and replay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from simulate_cases import curve, random_jobs, sim_job, world

from suika.cli.app import main
from suika.core.errors import SpecError
from suika.schedule.cycle import CycleResult
from suika.schedule.policies import load
from suika.simulate.engine import Engine
from suika.simulate.explain import explained
from suika.simulate.faults import faults
from suika.simulate.metrics import numbers, over_seeds
from suika.simulate.report import page
from suika.simulate.study import Run, parse_move_cost, parse_policies
from suika.simulate.world import Failure, Slowdown

KEYS = {
    "policy", "jobs", "avg_jct_s", "p50_jct_s", "p95_jct_s", "p99_jct_s", "max_jct_s", "makespan_s", "avg_slowdown",
    "worst_ftf", "moves_per_job", "lost_device_s", "decision_ms_p50", "decision_ms_p99",
}  # fmt: skip


def suika(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "suika.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_intervals_are_around_the_mean_over_seeds() -> None:
    seeds = [{"jobs": 20, "decisions": 9, "max_moves": moves, "avg_jct_s": s} for moves, s in ((2, 10.0), (8, 14.0))]
    row: Any = over_seeds(seeds)
    assert (row["jobs"], row["max_moves"], row["avg_jct_s"]) == (20, 8, 12.0)
    for key, mean in (("jobs", 20), ("max_moves", 5), ("avg_jct_s", 12)):
        assert sum(row["ci95"][key]) / 2 == pytest.approx(mean)


def test_every_condition_at_once_and_what_was_left_out(shared_data: Path, tmp_path: Path) -> None:
    """Load, lengths, noise, failures, failing moves, quotas, rigid jobs and predicted move costs in one run."""
    trace, quotas, failures = tmp_path / "few.csv", tmp_path / "quotas.yaml", tmp_path / "failures.csv"
    rows = [f"j{n},{40 * n},{1 + n % 5},{300 + 10 * n},{'ab'[n % 2]}" for n in range(30)]
    rows += [f"big{n},{n},400,60,a" for n in range(12)]
    trace.write_text("\n".join(["job_id,submit_s,gpus,duration_s,user", *rows, ""]))
    quotas.write_text("a: {guarantee: 8, max: 24}\nb: {max: 16}\n")
    failures.write_text("at_s,node,down_s\n100,n0,300\n")
    done = suika(
        "simulate", "--jobs", str(trace), "--cluster", "4x8:A800", "--times",
        str(shared_data / "rubick" / "iteration_times.csv"), "--policy", "suika,sia", "--move-cost", "model",
        "--load", "0.8", "--lengths", "noisy:0.5", "--noise", "0.07", "--failures", str(failures), "--failing-moves",
        "0.2", "--quotas", str(quotas), "--elastic-share", "0.7",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("suika", "sia"))
    assert "job big3 asks for 400 of 32 devices" in done.stderr
    assert "and 2 more jobs" in done.stderr


def test_the_document_and_the_report(shared_data: Path, tmp_path: Path):
    lines = (shared_data / "rubick" / "workload-base.csv").read_text().splitlines()
    trace = tmp_path / "few.csv"
    trace.write_text("\n".join([*lines[:21], "<script>x</script>,9,-1,vit,2,16,0,ga,5,0", ""]))
    report = tmp_path / "report.html"
    done = suika(
        "simulate", "--jobs", str(trace), "--cluster", "8x8:A800", "--times",
        str(shared_data / "rubick" / "iteration_times.csv"), "--policy", "suika,fifo,srtf:charge=2.0",
        "--move-cost", "30", "--seeds", "2", "--report", str(report), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["policy"] for row in document["policies"]] == ["suika", "fifo", "srtf:charge=2.0"]
    for row in document["policies"]:
        assert set(row) >= KEYS
        assert row["jobs"] == 20
        low, high = row["ci95"]["avg_jct_s"]
        assert low <= row["avg_jct_s"] <= high
        assert row["avg_jct_s"] >= document["lower_bound_avg_jct_s"] > 0
    assert document["dirty_rows"] == [{"line": 22, "reason": "lasts -1 s"}]
    text = report.read_text()
    assert text.count("<svg") == 5
    assert "<script" not in text
    assert "http" not in text


def test_the_report_draws_and_lists_moves():
    """Each move, stop and resume once in the chart and once in the list; a policy without any says so."""
    where = world(*random_jobs(7, num=25, load=2.0))
    runs = []
    for name in ("suika", "fifo"):
        outcome = Engine(where, load(name)).run()
        runs.append(Run(name, 0, where, outcome, numbers(where, outcome)))
    told = {
        "trace": "<t>", "cluster": "2x8:H100", "devices": 16, "load": 2.0, "seeds": [0], "move_cost": "10",
        "curves": "c", "models": "m", "lengths": "declared", "noise": 0.0, "lower_bound_avg_jct_s": 1.0,
        "dirty_rows": [], "left_out": [], "policies": [{"policy": run.policy, **run.numbers} for run in runs],
    }  # fmt: skip
    changes = [change for record in runs[0].outcome.records for change in record.changes]
    text = page(told, runs)
    assert len(changes) > 5
    assert text.count('fill="#d1632a"') == len(changes)
    assert f"{len(changes)} moves, stops and resumes" in text
    assert text.count("<td>preempt</td>") == sum(change.new == 0 for change in changes)
    assert text.count("No job was moved or stopped.") == 1
    assert "<t>" not in text


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--policy", "suica"), "policy"),
        (("--policy", "suika:taxes=2"), "policy.suika"),
        (("--move-cost", "-1"), "move-cost"),
        (("--lengths", "noisy"), "lengths"),
        (("--cluster", "8x8"), "cluster"),
        (("--format", "excel"), "format"),
        (("--seeds", "0"), "seeds"),
        (("--failures", "often"), "failures"),
        (("--load", "-2"), "load"),
        (("--load", "1"), "load"),  # one job: all come at once
        (("--load", "inf"), "load"),
        (("--noise", "nan"), "noise"),
        (("--failing-moves", "2"), "failing-moves"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    trace = tmp_path / "t.csv"
    trace.write_text("job_id,submit_s,gpus,duration_s\na,0,1,60\n")
    command = ["suika", "simulate", "--jobs", str(trace), "--cluster", "1x8:A800", *arguments]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert field in told
    assert len(told.splitlines()) == 1


def test_a_single_job_on_a_single_device_is_valid_json(tmp_path: Path, shared_data: Path):
    trace = tmp_path / "t.csv"
    trace.write_text("job_id,submit_s,gpus,duration_s\na,0,1,60\n")
    done = suika(
        "simulate", "--jobs", str(trace), "--cluster", "1x1:A800", "--policy", "suika,sia,gavel,themis,smartfill",
        "--times", str(shared_data / "rubick" / "iteration_times.csv"), "--report", str(tmp_path / "r.html"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    document = json.loads(done.stdout, parse_constant=refuse)
    assert document["load"] is None
    assert "all jobs come at once" in (tmp_path / "r.html").read_text()


def test_policies_on_a_command_line():
    assert parse_policies("suika,rubick,suika:tax=4,spread=2.0") == ("suika", "rubick", "suika:tax=4,spread=2.0")
    with pytest.raises(SpecError):
        parse_policies(",")
    assert parse_move_cost("model") is None
    assert parse_move_cost("2.5") == 2.5


def test_failures_from_a_file_or_a_law(tmp_path: Path):
    cluster = world().cluster
    path = tmp_path / "f.csv"
    path.write_text("at_s,node,down_s\n50,n1,10\n10,n0,5\n")
    assert [f.node for f in faults(str(path), cluster, 1e6, 0)] == ["n0", "n1"]
    drawn = faults("10h", cluster, 1e6, 0)
    assert drawn == faults("10h", cluster, 1e6, 0) != faults("10h", cluster, 1e6, 1)
    assert 20 < len(drawn) < 100  # 2 nodes, 1e6 s, a failure every 11 h with repair
    path.write_text("at_s,node,down_s,slow\n50,n1/3,10,\n10,n0,5,2.5\n")
    assert faults(str(path), cluster, 1e6, 0) == (Slowdown(10.0, "n0", 5.0, 2.5), Failure(50.0, "n1", 10.0, index=3))
    for row in ("50,n1/8,10,", "50,n1,-1,", "-1,n1,1,", "5,n1,1,0.5", "5,n1,1,x", "5,n1,1", "5,n0,9,\n6,n0/1,1,"):
        path.write_text(f"at_s,node,down_s,slow\n{row}\n")
        with pytest.raises(SpecError):
            faults(str(path), cluster, 1e6, 0)
    path.write_text("at_s,node,down_s\n50,n9,10\n")
    with pytest.raises(SpecError, match="no such node"):
        faults(str(path), cluster, 1e6, 0)


def test_decisions_can_be_replayed():
    """The same world gives the same decisions, reasons included; that is what a replay is checked against."""

    def log() -> list[str]:
        seen: list[str] = []

        def note(result: CycleResult) -> None:
            seen.extend(f"{result.snapshot.now_s:.3f} {step}" for step in result.steps)

        Engine(world(*random_jobs(9, num=12)), load("suika"), on_cycle=note).run()
        return seen

    assert log() == log()


def test_a_job_is_explained_at_an_instant(tmp_path: Path):
    """The long job is stopped for the short one at 100 s, and the words say so."""
    known = curve(1.0, sizes=(8,))
    gang = {"min_devices": 8, "max_devices": 8, "requested_devices": 8}
    where = world(
        sim_job("long", 0.0, 1e5, known, **gang), sim_job("short", 100.0, 80.0, known, **gang), cluster="1x8:H100"
    )
    told = explained(where, load("suika"), "long", 110.0)
    assert told["state"] == "queued"
    assert told["reason"]["code"] == "preempt"
    assert [event["data"]["action"] for event in told["history"]] == ["start", "preempt"]
    assert told["waits_for"]["in_s"] is None or told["waits_for"]["in_s"] < 60
    assert {"change": "priority 1 instead of 0", "then": "it starts on 8 devices as tp1 pp1 dp8"} in told[
        "would_change"
    ]
    running = explained(where, load("suika"), "long", 50.0)
    assert (running["state"], len(running["devices"])) == ("running", 8)
    for job_id, at_s, problem in (("none", 1.0, "no job"), ("short", 1.0, "comes at"), ("short", 1e4, "has ended")):
        with pytest.raises(SpecError, match=problem):
            explained(where, load("suika"), job_id, at_s)


def test_explaining_from_the_command_line(tmp_path: Path, shared_data: Path):
    trace = tmp_path / "t.csv"
    trace.write_text("job_id,submit_s,gpus,duration_s,model\na,0,8,600,vit\nb,10,8,600,bert\n")
    ask = ("simulate", "--jobs", str(trace), "--cluster", "1x8:A800", "--times",
           str(shared_data / "rubick" / "iteration_times.csv"), "--move-cost", "30", "--explain", "a@5m")  # fmt: skip
    document = json.loads(suika(*ask, "--json").stdout)
    assert document["id"] == "a"
    assert document["options"]
    text = suika(*ask).stdout
    assert "a is running" in text
    assert "Options" in text
    assert suika(*ask[:-1], "a").returncode == 2
