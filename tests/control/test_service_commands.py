"""The commands of those who run the service: accounts, quotas, backup and restore, serve itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from suika.control.client import NoControllerError, call

pytestmark = pytest.mark.timeout(180)
MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}


def run(home: Path, *arguments: object, rc: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "suika.cli", *map(str, arguments)]
    environment = {**os.environ, "SUIKA_HOME": str(home)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == rc, (done.stdout, done.stderr)
    return done


def test_from_the_first_start_to_a_restored_backup(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    command = [sys.executable, "-m", "suika.cli", "serve", "--cluster", "2x4:cpu"]
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen(command, env={**os.environ, "SUIKA_HOME": str(home)}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                url = call("status", home / "controller.sock")["url"]
                break
            except (NoControllerError, OSError):
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert (home / "admin.token").stat().st_mode & 0o077 == 0
        token = run(home, "account", "add", "ann", "--role", "user", "--tenant", "research").stdout.strip()
        refused = run(home, "account", "add", "ann", "--role", "user", "--tenant", "research", rc=2)
        assert "exists already" in refused.stderr
        listed = json.loads(run(home, "account", "list", "--json").stdout)["accounts"]
        assert [row["name"] for row in listed] == ["admin", "ann", "node"]
        text = tmp_path / "text"
        text.write_text("some text to train on\n" * 100)
        job = {"name": "a", "model": MODEL, "data": str(text), "global_batch": 8, "sequence_length": 16, "steps": 10}
        headers = {"authorization": f"Bearer {token}"}
        refusal = httpx.post(f"{url}/v1/jobs", json=job, headers=headers, timeout=30)
        assert (refusal.status_code, refusal.json()["error"]["field"]) == (422, "job.data")
        assert "--data-root" in refusal.json()["error"]["fix"]
        job["data"] = str(text.rename(home / "shared" / "text"))
        assert httpx.post(f"{url}/v1/jobs", json=job, headers=headers, timeout=30).status_code == 201
        assert json.loads(run(home, "quota", "research", 4, "--json").stdout) == {
            "quotas": [{"tenant": "research", "guarantee": 0, "guarantee_nodes": 0, "max": 4, "held": 0}]
        }
        both = json.loads(run(home, "quota", "research", "--guarantee", 2, "--json").stdout)["quotas"][0]
        assert (both["guarantee"], both["max"]) == (2, 4)
        run(home, "quota", "research", rc=2)
        run(home, "account", "revoke", "ann")
        assert httpx.get(f"{url}/v1/jobs", headers=headers, timeout=30).status_code == 401
        assert "rows in" in run(home, "store", "backup", tmp_path / "backup.gz").stderr
    finally:
        server.terminate()
        assert server.wait(30) == 0
    other.mkdir()
    run(other, "store", "restore", tmp_path / "backup.gz")
    assert "is not empty" in run(other, "store", "restore", tmp_path / "backup.gz", rc=2).stderr
    listed = json.loads(run(other, "account", "list", "--json").stdout)["accounts"]
    assert [row["name"] for row in listed] == ["admin", "ann", "node"]
