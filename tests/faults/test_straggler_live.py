"""A real rank that is stopped again and again for moments, in a real job: found by its device, and well again after."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from suika.control.service import Service
from suika.core.cluster import parse_cluster_shorthand

MODEL = {"family": "llama", "layers": 2, "hidden": 64, "ffn": 160, "heads": 4, "vocab": 257}
pytestmark = [pytest.mark.fault, pytest.mark.timeout(420)]


@contextlib.contextmanager
def pulses(pid: int, stopped_s: float = 0.03, running_s: float = 0.006) -> Iterator[None]:
    """The process stands for `stopped_s` of every `stopped_s + running_s`."""
    enough = threading.Event()

    def pulse() -> None:
        while not enough.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running_s)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()
        os.kill(pid, signal.SIGCONT)


def test_a_rank_that_is_held_up_is_found_and_only_that_one(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some text to train on\n" * 2000)
    with Service(parse_cluster_shorthand("1x2:cpu"), tmp_path / "home") as service:
        body = {"name": "a", "model": MODEL, "data": str(text), "global_batch": 8, "sequence_length": 64}
        body |= {"steps": 1_000_000, "devices": {"min": 2, "max": 2}, "layout": {"dp": 2}, "snapshot_every_steps": 0}
        job_id = service.api.submit(body)["id"]
        state = service.controller.state
        _wait(lambda: state.seen(job_id).samples.num_samples >= 2 * 12, "twelve samples of each rank")
        assert _told(service, "straggler") == []  # nobody is slow: no alarm
        slow = "n0/1"
        run: Any = state.seen(job_id).run
        pid = next(member.pid for device, member in run.ranks.items() if str(device) == slow)
        with pulses(pid):
            _wait(lambda: bool(_told(service, "straggler")), "the alarm")
            told = _told(service, "straggler")
            assert {data["device"] for data in told} == {slow}
            assert service.api.describe("a")["stragglers"][0]["device"] == slow
            (node,) = service.api.nodes()
            assert [bool(device["slow"]) for device in node["devices"]] == [False, True]
        _wait(lambda: bool(_told(service, "straggler-gone")), "the end of the alarm")
        assert service.api.describe("a")["stragglers"] == []


def _told(service: Service, kind: str) -> list[dict[str, Any]]:
    return [event["data"] for event in service.api.events(limit=100_000) if event["kind"] == kind]


def _wait(condition: Any, what: str, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)
