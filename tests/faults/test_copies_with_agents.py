"""Copies in memory on real agents: holders outlive the controller, and a new one recovers from them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from outages import Net, abandon, alive, wait

from suika.core.cluster import Cluster, Device, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.runtime.adopt import OnRecord, take_back
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Copied, Ended, JobEvent, Outcome, Started

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

CLUSTER = Cluster((Node("a", 4, "cpu"),))
MODEL = {"family": "llama", "layers": 3, "hidden": 16, "ffn": 24, "heads": 4, "kv_heads": 2, "vocab": 37}


def job() -> JobSpec:
    base = {"name": "tiny", "model": MODEL, "data": "none", "global_batch": 12, "sequence_length": 8}
    more = {"precision": "fp64", "steps": 1_000_000, "snapshot_every_steps": 0, "memory_copy_every_steps": 10}
    return parse_job({**base, **more})


def plan(layout: str, *indices: int) -> Plan:
    spec, devices = job(), tuple(Device("a", index) for index in indices)
    return Plan.checked(Layout.parse(layout), devices, spec.model, spec.global_batch, spec.sequence_length, CLUSTER)


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path, lease_s=3.0)
    yield made
    made.close()


def begun(net: Net) -> tuple[JobRun, list[JobEvent]]:
    events: list[JobEvent] = []
    folder = net.folder / "j1"
    return JobRun("j1", job(), net.hub, CLUSTER, folder, str(net.folder), events.append, "tiny_program:build"), events


def test_a_new_controller_finds_the_copies_and_recovers_from_them(net: Net) -> None:
    net.agent()
    net.wait_for("a")
    run, events = begun(net)
    run.start(plan("dp=2", 0, 1), 1).result(120)
    wait(lambda: any(isinstance(event, Copied) for event in events), 60, "a copy")
    known = OnRecord(run.plan, 1, run.step, Reason(ReasonCode.USER, "the test wants it"), None)
    pids, holders = [member.pid for member in run.ranks.values()], run.copies.pids("a")
    abandon(run)
    net.end()
    time.sleep(1.0)
    assert all(alive(pid) for pid in (*pids, *holders))
    net.begin()
    again, events = begun(net)
    take_back(again, known, net.wait_for("a"), net.hub.claim).result(30)
    wait(lambda: again.copies.newest is not None, 30, "the copies")
    assert again.copies.pids("a") == holders
    os.kill(pids[1], signal.SIGKILL)
    wait(lambda: any(isinstance(event, Ended) for event in events), 30, "the end")
    ended = next(event for event in events if isinstance(event, Ended))
    assert ended.outcome == Outcome.LOST
    assert ended.snapshot.startswith("memory:1/")
    again.start(plan("tp=2", 2, 3), 2, ended.snapshot).result(120)
    started = next(event for event in events if isinstance(event, Started))
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)
    again.close()
    wait(lambda: not any(alive(pid) for pid in holders), 20, "the holders to end")
