"""The whole service on PostgreSQL: jobs outlive it, and of two controllers on one database the later one has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from suika.control.client import NoControllerError, call

pytestmark = [pytest.mark.service, pytest.mark.timeout(180)]
MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}


def serve(home: Path, url: str) -> subprocess.Popen[bytes]:
    """A controller that answers."""
    home.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "suika.cli", "serve", "--database", url, "--cluster", "2x4:cpu"]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(command, env={**os.environ, "SUIKA_HOME": str(home)}, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert call("status", home / "controller.sock")["pid"] == process.pid
        except (NoControllerError, OSError):
            assert process.poll() is None, (home / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return process


def test_jobs_outlive_the_controller_and_only_the_latest_has_the_database(
    tmp_path: Path, new_database: Callable[[], str]
) -> None:
    url = new_database()
    text = tmp_path / "text"
    text.write_text("some text to train on\n" * 100)
    job = {"name": "a", "model": MODEL, "data": str(text), "global_batch": 8, "sequence_length": 16, "steps": 10}
    first = serve(tmp_path / "one", url)
    try:
        made = call("submit", tmp_path / "one" / "controller.sock", job=job, request_id="r")
        second = serve(tmp_path / "two", url)
        try:
            rows = call("jobs", tmp_path / "two" / "controller.sock")
            assert [row["id"] for row in rows] == [made["id"]]
            with pytest.raises((NoControllerError, OSError, json.JSONDecodeError)):
                call("submit", tmp_path / "one" / "controller.sock", job=job | {"name": "b"})
            assert first.wait(30) == 4  # it noticed, and left at once
            assert "another controller has taken over" in (tmp_path / "one" / "log").read_text()
            again = call("submit", tmp_path / "two" / "controller.sock", job=job, request_id="r")
            assert again["id"] == made["id"]
            assert [row["name"] for row in call("jobs", tmp_path / "two" / "controller.sock", all=True)] == ["a"]
        finally:
            second.terminate()
            assert second.wait(30) == 0
    finally:
        if first.poll() is None:
            first.kill()
            first.wait(20)
