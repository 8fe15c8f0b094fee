"""`suika up` to `suika down`: a cluster in the background, asked from other processes, that leaves nothing behind."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import yaml
from live import document, suika

pytestmark = pytest.mark.timeout(240)
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.fault  # real processes, 15 s
def test_up_submit_wait_down(tmp_path: Path) -> None:
    home = tmp_path / "a home with spaces" / ("deep" * 30)  # longer than a socket address may be
    status = document(suika("up", "--cluster", str(EXAMPLES / "cluster.yaml"), "--json", home=home, timeout_s=180))
    controller = psutil.Process(status["pid"])
    try:
        again = suika("up", home=home)
        assert again.returncode == 2
        assert "a cluster is up" in again.stderr
        assert len(document(suika("nodes", "--json", home=home))["nodes"]) == 2

        plan = document(suika("submit", str(EXAMPLES / "job.yaml"), "--dry-run", "--json", home=home))
        assert plan["dry_run"] is True
        assert plan["options"][-1]["devices"] == 8
        assert document(suika("ps", "--all", "--json", home=home)) == {"jobs": []}

        job = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
        (tmp_path / "text").write_text("a few words, again and again. " * 200)
        job |= {"data": "text", "steps": 12, "devices": {"min": 1, "max": 2}}
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        done = suika("submit", str(tmp_path / "job.yaml"), "--wait", "--json", home=home, timeout_s=120)
        row = document(done)
        assert (row["state"], row["steps_done"]) == ("finished", 12)
        assert row["jct_s"] > 0
        assert "NaN" not in done.stdout
        kinds = [event["kind"] for event in document(suika("events", "--json", home=home))["events"]]
        assert kinds.index("node-arrived") < kinds.index("submitted")
        assert "job-finished" in kinds
        table = suika("ps", "--all", "-o", "wide", home=home).stdout
        assert "small-llama" in table
        assert "12/12" in table

        endless = job | {"name": "endless", "steps": 1_000_000}
        (tmp_path / "endless.yaml").write_text(yaml.safe_dump(endless))
        first = document(suika("submit", str(tmp_path / "endless.yaml"), "--request-id", "r", "--json", home=home))
        again = document(suika("submit", str(tmp_path / "endless.yaml"), "--request-id", "r", "--json", home=home))
        assert first["id"] == again["id"]
        family = [controller, *controller.children(recursive=True)]
        assert len(family) >= 2
    finally:
        down = suika("down", "--json", home=home, timeout_s=90)
    assert document(down)["jobs_ended"] == ["endless"]
    deadline = time.monotonic() + 10
    while any(_lives(process) for process in family) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [process for process in family if _lives(process)] == []
    assert not (home / "controller.sock").exists()
    assert not (home / "controller.pid").exists()
    assert suika("ps", home=home).returncode == 3


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.fault
def test_up_again_after_its_controller_was_killed(tmp_path: Path) -> None:
    """`suika up` restarts it: the job never noticed, its processes are the same, its record goes on."""
    home = tmp_path / "home"
    (tmp_path / "text").write_text("a few words, again and again. " * 200)
    job = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
    job |= {"data": "text", "steps": 1_000_000, "devices": {"min": 2, "max": 2}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    status = document(suika("up", "--cluster", "1x2:cpu", "--json", home=home, timeout_s=180))
    try:
        submitted = document(suika("submit", str(tmp_path / "job.yaml"), "--json", home=home))
        assert submitted["state"] == "queued"
        before = _running(home)
        ranks = _ranks(home)
        assert len(ranks) >= 2
        psutil.Process(status["pid"]).kill()
        again = document(suika("up", "--cluster", "1x2:cpu", "--json", home=home, timeout_s=180))
        assert (again["term"], again["url"]) == (status["term"] + 1, status["url"])
        after = _running(home, beyond=before["steps_done"])
        assert (after["id"], after["generation"]) == (before["id"], 1)
        assert _ranks(home) == ranks
    finally:
        suika("down", "--json", home=home, timeout_s=90)
    assert not [pid for pid in ranks if psutil.pid_exists(pid)]


def _running(home: Path, beyond: int = 0) -> dict:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        (row,) = document(suika("ps", "--json", home=home))["jobs"]
        if row["state"] == "running" and row["steps_done"] > beyond:
            return row
        time.sleep(0.2)
    raise AssertionError(row)


def _ranks(home: Path) -> set[int]:
    """What the cluster's fork server has forked."""
    own = [p for p in psutil.process_iter(["cmdline"]) if str(home / "agents") in " ".join(p.info["cmdline"] or ())]
    servers = [p for p in own if "suika.runtime.lasting" in p.info["cmdline"]]
    return {child.pid for server in servers for child in server.children()}
