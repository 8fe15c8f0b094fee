"""Real processes on real agents: the controller, the agent or the link goes, and training does not notice."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from outages import Net, abandon, alive, fork_servers_below, wait

from suika.core.cluster import Cluster, Device, Node
from suika.core.decision import Reason, ReasonCode
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.runtime.adopt import OnRecord, take_back
from suika.runtime.coordinator import JobRun
from suika.runtime.events import Ended, JobEvent, Moving, Outcome, StepDone

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

CLUSTER = Cluster((Node("a", 4, "cpu"),))
MODEL = {"family": "llama", "layers": 3, "hidden": 16, "ffn": 24, "heads": 4, "kv_heads": 2, "vocab": 37}
WHY = Reason(ReasonCode.USER, "the test wants it")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path, lease_s=3.0)
    yield made
    made.close()


class Run(JobRun):
    """A job on the hub whose events the test can read."""

    def __init__(self, net: Net, job_id: str = "j1") -> None:
        self.events: list[JobEvent] = []
        folder = net.folder / job_id
        super().__init__(
            job_id, spec(), net.hub, CLUSTER, folder, str(net.folder), self.events.append, "tiny_program:build"
        )

    @property
    def steps(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, StepDone)]

    @property
    def pids(self) -> dict[Device, int | None]:
        return {device: member.pid for device, member in self.ranks.items()}

    def wait_steps(self, num: int) -> None:
        target = self.step + num
        wait(lambda: self.step >= target, 60, f"step {target}")


def spec() -> JobSpec:
    base = {"name": "tiny", "model": MODEL, "data": "none", "global_batch": 12, "sequence_length": 8}
    return parse_job({**base, "precision": "fp64", "steps": 1_000_000, "snapshot_every_steps": 20})


def plan(layout: str, *indices: int) -> Plan:
    job = spec()
    devices = tuple(Device("a", index) for index in indices)
    return Plan.checked(Layout.parse(layout), devices, job.model, job.global_batch, job.sequence_length, CLUSTER)


def started(net: Net) -> Run:
    net.agent()
    net.wait_for("a")
    run = Run(net)
    run.start(plan("dp=2", 0, 1), 1).result(120)
    run.wait_steps(5)
    return run


def record(run: JobRun, **more: Any) -> OnRecord:
    path, step = run.keeper.newest
    return OnRecord(run.plan, run.generation, run.step, WHY, (path, step) if path else None, **more)


def test_a_new_controller_takes_over_what_trains(net: Net) -> None:
    run = started(net)
    pids, known = run.pids, record(run)
    abandon(run)
    net.end()
    time.sleep(1.0)
    assert all(alive(pid) for pid in pids.values())
    net.begin()
    found = net.wait_for("a")
    again = Run(net)
    take_back(again, known, found, net.hub.claim).result(30)
    again.wait_steps(10)
    assert again.pids == pids
    assert min(again.steps) > known.step  # it went on meanwhile
    # and everything that a coordinator does still works: snapshot, move, end
    assert again.snapshot().result(60).endswith(".g1")
    moved = again.redeploy(plan("tp=2,dp=2", 0, 1, 2, 3), 2, WHY).result(120)
    assert moved.error is None
    assert {again.pids[Device("a", index)] for index in (0, 1)} == set(pids.values())
    again.wait_steps(5)
    again.close()
    wait(lambda: not any(alive(pid) for pid in pids.values()), 20, "the ranks to end")


@pytest.mark.parametrize("committed", [False, True])
def test_a_move_in_flight_when_the_controller_dies_is_settled_by_the_record(net: Net, committed: bool) -> None:
    """Killed at the point of no return: just before its compare-and-set, or just after."""
    run = started(net)
    pids, target = run.pids, plan("dp=2", 1, 2)

    class Killed(BaseException):
        pass

    def commit() -> bool:
        run.closed = True
        run.gang.members.clear()
        raise Killed

    run._end_badly = lambda error: None  # the process is gone: it does not tidy up
    with pytest.raises(Killed):
        run.redeploy(target, 2, WHY, commit).result(120)
    known = record(run, move=(target, 2), committed=committed)
    if committed:
        known = OnRecord(target, 2, run.step, WHY, known.snapshot, move=(target, 2), committed=True)
    net.end()
    net.begin()
    again = Run(net)
    take_back(again, known, net.wait_for("a"), net.hub.claim).result(30)
    again.wait_steps(10)
    assert again.plan.devices == (target if committed else known.plan).devices
    assert again.pids[Device("a", 1)] == pids[Device("a", 1)]
    assert [event.record.error is None for event in again.events if isinstance(event, Moving)] == [committed]
    steps = again.steps
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    moved = again.redeploy(plan("dp=1", 1), 3, WHY).result(120)  # the next move is as good as any
    assert moved.error is None
    again.close()


def test_a_rank_that_died_meanwhile_is_a_loss_as_ever(net: Net) -> None:
    run = started(net)
    run.snapshot().result(60)
    pids, known = run.pids, record(run)
    abandon(run)
    net.end()
    os.kill(pids[Device("a", 1)], signal.SIGKILL)
    wait(lambda: not alive(pids[Device("a", 1)]), 10, "the rank to die")
    net.begin()
    again = Run(net)
    take_back(again, known, net.wait_for("a"), net.hub.claim)
    wait(lambda: any(isinstance(event, Ended) for event in again.events), 30, "the end")
    (ended,) = [event for event in again.events if isinstance(event, Ended)]
    assert ended.outcome is Outcome.LOST
    assert ended.snapshot == known.snapshot[0]
    assert not any(alive(pid) for pid in pids.values())
    again.start(plan("dp=2", 2, 3), 2, ended.snapshot).result(120)
    again.wait_steps(5)
    assert min(again.steps) == known.snapshot[1] + 1
    again.close()


def test_a_killed_agent_is_replaced_and_the_job_does_not_notice(net: Net) -> None:
    run = started(net)
    pids = run.pids
    (server,) = fork_servers_below(net.folder)
    net.agents[0].kill()
    net.agents[0].wait(10)
    time.sleep(0.5)
    net.agent()
    run.wait_steps(20)
    assert run.pids == pids
    assert fork_servers_below(net.folder) == [server]
    assert run.redeploy(plan("dp=3", 0, 1, 2), 2, WHY).result(120).error is None
    assert not [event for event in run.events if isinstance(event, Ended)]
    run.close()


def test_a_partition_past_the_lease_leaves_one_progress_history(net: Net) -> None:
    """The agent is stopped: to the controller that is a cut link; the ranks train on."""
    run = started(net)
    run.snapshot().result(60)
    pids = run.pids
    os.kill(net.agents[0].pid, signal.SIGSTOP)
    wait(lambda: net.seen.gone == ["a"], 30, "the lease to run out")
    wait(lambda: any(isinstance(event, Ended) for event in run.events), 30, "the job to be given up")
    history = run.steps
    assert all(alive(pid) for pid in pids.values())  # nobody can reach them
    os.kill(net.agents[0].pid, signal.SIGCONT)
    strangers = net.wait_for("a")
    assert len([name for name in strangers if ".store." not in name]) == 2
    for name in strangers:
        net.hub.kill(name)
    wait(lambda: not any(alive(pid) for pid in pids.values()), 20, "the old ranks to end")
    assert run.steps == history  # what they did behind the partition never counted
    ended = next(event for event in run.events if isinstance(event, Ended))
    run.start(plan("dp=2", 0, 1), 2, ended.snapshot).result(120)
    run.wait_steps(3)
    later = run.steps[len(history) :]
    assert later == list(range(ended.snapshot_step + 1, ended.snapshot_step + 1 + len(later)))
    run.close()


def test_orphans_end_at_their_limit(net: Net) -> None:
    net.agent(orphan_limit_s=4.0)
    net.wait_for("a")
    run = Run(net)
    run.start(plan("dp=2", 0, 1), 1).result(120)
    pids = run.pids
    abandon(run)
    net.agents[0].kill()
    time.sleep(2.0)
    assert all(alive(pid) for pid in pids.values())
    wait(lambda: not any(alive(pid) for pid in pids.values()), 20, "the orphans to end")
    wait(lambda: not fork_servers_below(net.folder), 20, "the fork server to end")
