"""Copies in memory on real agents: holders outlive the controller, and a new one recovers from them, or ends them."""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from controllers import ServedCluster, served
from outages import Net, abandon, alive, fork_servers_below, wait

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


WAITS = ("recovering", "queued", "unsatisfiable")


# -- a controller that is killed while the job waits ------------------------------------------------------------------


def submitted(cluster: ServedCluster, name: str, devices: int, **more: Any) -> None:
    """A job that runs, and that has copies of its state in memory."""
    job = cluster.job(name, 1_000_000, devices, devices, memory_copy_every_steps=5, snapshot_every_steps=0, **more)
    job["preemption"] = {"policy": "never"}
    cluster.ask("submit", job=job)
    wait(lambda: ((cluster.ask("describe", job=name)["memory_copies"] or {}).get("step") or 0) > 5, 90, "a copy")


def processes(folder: Path) -> list[int]:
    """All that the fork servers below `folder` have forked."""
    found = []
    for server in fork_servers_below(folder):
        found += [int(pid) for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split()]
    return found


def strike(cluster: ServedCluster, name: str, node: str) -> int:
    """Kill every process of the job on `node`; the step that it is to go on from. It waits until `may_start`."""
    cluster.ask("set_quota", tenant="default", quota={"max": 1})
    for pid in processes(cluster.folder / node):
        os.kill(pid, signal.SIGKILL)
    # Events are read from the store: a controller that is killed from now on has the loss on record.
    wait(lambda: events(cluster, name, "job-recovering"), 60, "the loss to be noticed")
    assert cluster.rows()[name]["state"] in WAITS
    return int(cluster.rows()[name]["steps_done"])


def may_start(cluster: ServedCluster) -> None:
    cluster.ask("set_quota", tenant="default", quota={"max": None})


def events(cluster: ServedCluster, name: str, kind: str) -> list[dict[str, Any]]:
    found = cluster.ask("events", job=name, limit=10_000, newest=True)
    return [event["data"] for event in found if event["kind"] == kind]


def restart(cluster: ServedCluster) -> None:
    cluster.kill_controller()
    time.sleep(1.0)
    cluster.controller = cluster.begin()
    cluster.ask("status")


def test_a_job_that_waits_keeps_its_copies_over_a_restart(tmp_path: Path) -> None:
    with served(tmp_path, policy="fifo", devices=2) as cluster:
        submitted(cluster, "big", 4)
        for row in cluster.ask("nodes"):
            assert 0 < row["copies_bytes"] < row["copies_limit_bytes"]
        step = strike(cluster, "big", "n0")
        assert step > 0
        holders = processes(cluster.folder / "n1")
        assert len(holders) == 1, "the other node's holder has everything"
        restart(cluster)
        wait(lambda: events(cluster, "big", "taken-back"), 90, "its copies to be found")
        assert int(events(cluster, "big", "taken-back")[-1]["copies"].rpartition("/")[2]) >= step
        restart(cluster)
        wait(lambda: len(events(cluster, "big", "taken-back")) == 2, 90, "them to be found once more")
        may_start(cluster)
        wait(lambda: len(events(cluster, "big", "launched")) == 2, 90, "the job to run again")
        assert events(cluster, "big", "launched")[-1]["resumed_step"] >= step
        assert events(cluster, "big", "copies-gone") == []
        wait(lambda: cluster.ask("describe", job="big")["memory_copies"] is not None, 60, "copies of the new run")
        assert alive(holders[0]), "it goes on keeping"
        cluster.ask("cancel", job="big")
        wait(lambda: not processes(cluster.folder), 30, "all its processes to end, holders too")
        wait(lambda: not any(row["copies_bytes"] for row in cluster.ask("nodes")), 30, "nobody to count them")


def test_without_its_copies_it_does_not_wait_for_ever(tmp_path: Path) -> None:
    """They are lost while nobody looks: it begins from its snapshot, here from nothing, and says so."""
    with served(tmp_path, policy="fifo", devices=2) as cluster:
        submitted(cluster, "big", 4)
        step = strike(cluster, "big", "n0")
        cluster.kill_controller()
        for pid in processes(cluster.folder):
            os.kill(pid, signal.SIGKILL)
        cluster.controller = cluster.begin()
        may_start(cluster)
        wait(lambda: len(events(cluster, "big", "launched")) == 2, 90, "the job to run again")
        assert events(cluster, "big", "copies-gone") == [{"step": step, "snapshot_step": 0}]
        assert events(cluster, "big", "launched")[-1]["resumed_step"] == 0


def test_a_node_is_lost_for_good_and_the_controller_with_it(tmp_path: Path) -> None:
    """The job ran on that node alone. What it starts from lies on the other, where another job has all devices; that
    the first node never comes back keeps nobody waiting."""
    with served(tmp_path, policy="fifo", devices=2) as cluster:
        submitted(cluster, "lost", 2)
        submitted(cluster, "other", 2)
        node = cluster.rows()["lost"]["devices"][0].partition("/")[0]
        cluster.agents[int(node[1:])].kill()
        for pid in fork_servers_below(cluster.folder / node):
            os.kill(pid, signal.SIGKILL)
        wait(lambda: cluster.rows()["lost"]["state"] == "queued", 90, "the lease to run out")
        step = cluster.rows()["lost"]["steps_done"]
        assert step > 0
        restart(cluster)
        wait(lambda: events(cluster, "lost", "taken-back"), 90, "its copies to be found")
        happened = cluster.ask("events", limit=10_000, newest=True)
        arrived_s = next(event["at_s"] for event in reversed(happened) if event["kind"] == "node-arrived")
        taken_s = next(
            event["at_s"]
            for event in reversed(happened)
            if event["kind"] == "taken-back" and event["data"].get("copies")
        )
        assert taken_s - arrived_s < 20, "less than a lease"
        assert cluster.rows()["other"]["state"] == "running"
        cluster.ask("cancel", job="other")
        wait(lambda: len(events(cluster, "lost", "launched")) == 2, 60, "the job to run again")
        assert events(cluster, "lost", "launched")[-1]["resumed_step"] >= step
        cluster.ask("cancel", job="lost")
        wait(lambda: not processes(cluster.folder), 30, "all processes to end, holders too")


@pytest.mark.parametrize("change", ["UPDATE jobs SET state = 'cancelled'", "DELETE FROM jobs"])
def test_holders_of_jobs_that_have_ended_or_that_nobody_knows_are_ended(tmp_path: Path, change: str) -> None:
    with served(tmp_path, policy="fifo", devices=2) as cluster:
        submitted(cluster, "big", 4)
        strike(cluster, "big", "n0")
        assert processes(cluster.folder)
        cluster.kill_controller()
        with closing(sqlite3.connect(cluster.home / "suika.db")) as database:
            database.execute("PRAGMA foreign_keys = OFF")
            database.execute(change)
            database.commit()
        cluster.controller = cluster.begin()
        wait(lambda: not processes(cluster.folder), 60, "the holders to be ended")
        wait(lambda: all(d["state"] == "free" for n in cluster.ask("nodes") for d in n["devices"]), 30, "free devices")
