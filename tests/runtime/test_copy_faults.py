"""A seeded injector walks the taking of a copy: whatever happens to a holder, training goes on, the newest complete
copies stay whole, and the state that comes back out of them after the loss of a node is exact."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from suika.runtime.events import Ended, Outcome, Snapshotted, Uncopied

from .conftest import Watched, plan, spec
from .test_copies import goes_on, strike_node, wait_copied

pytestmark = pytest.mark.fault

STAGES = [
    (("tp=2,pp=1,dp=1", "a0 a1"), "a"),
    (("tp=2,pp=1,dp=2", "a0 a1 b0 b1"), "ab"),
    (("tp=1,pp=3,dp=1", "b0 b1 a0"), "ab"),
]
ELSEWHERE = {"a": ("tp=1,pp=1,dp=2", "b0 b1"), "b": ("tp=1,pp=1,dp=3", "a0 a1 a2")}
AT_THE_SENDER = ("taken", "summed", "sending", "half sent", "sent")
FAULTS = [
    *((point, "kill") for point in (*AT_THE_SENDER, "room", "half received", "received", "kept", "dropping")),
    *((point, "cut") for point in ("taken", "sending", "half sent", "half received", "received")),
    *((point, "refuse") for point in ("room", "summed", "received")),
    *((point, "stop") for point in ("taken", "half received")),
]


class FaultyProcesses:
    """`Processes` that give the next holder on `node` a fault."""

    def __init__(self, below: Any, node: str, fault: Mapping[str, Any]) -> None:
        self._below, self._node, self._fault = below, node, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Any) -> None:
        more = {"fault": self._fault} if node == self._node else {}
        self._below.spawn(process, node, "faulty_holder:main", {**launch, **more}, listener)


@pytest.mark.parametrize(("point", "do"), FAULTS)
def test_what_happens_to_a_holder_costs_no_complete_copy(
    run: Callable[..., Watched], tmp_path: Path, point: str, do: str
) -> None:
    dice = random.Random(f"{point} {do}")
    layout, nodes = dice.choice(STAGES)
    faulty = dice.choice(nodes if point in AT_THE_SENDER else "b" if nodes == "a" else nodes)
    job, mark = spec(memory_copy_every_steps=5), tmp_path / "happened"
    job_run = run(job)
    # Each set passes a point once per rank: none happens before the first set is complete.
    fault = {"point": point, "do": do, "times": dice.randrange(4, 9), "mark": str(mark)}
    job_run.copies.holders._processes = FaultyProcesses(job_run.copies._processes, faulty, fault)  # type: ignore[assignment]
    job_run.start(plan(*layout, job), 1).result(60)
    job_run.snapshot().result(60)
    saved = job_run.wait(Snapshotted).step
    before = wait_copied(job_run, 1)
    deadline = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < deadline, f"never {point}"
        time.sleep(0.005)
    at_once = dice.random() < 0.5
    if not at_once:
        before = wait_copied(job_run, job_run.step + 1, timeout_s=90)
    # Of a set that has lost one holder the other node has everything.
    struck = faulty if at_once and do in ("kill", "stop") and faulty in nodes else dice.choice(nodes)
    if at_once and do in ("kill", "stop") and faulty not in nodes:
        os.kill(job_run.pid(layout[1].split()[0]), signal.SIGKILL)  # its only node still has its holder
    else:
        strike_node(job_run, struck, "SIGKILL")
    ended = job_run.wait(Ended)
    assert ended.outcome == Outcome.LOST
    assert ended.snapshot.startswith("memory:"), job_run.copies.error
    assert ended.snapshot_step >= max(before.step, saved)
    started = goes_on(job_run, job, ended.snapshot, ELSEWHERE[struck])
    assert (started.resumed_step, started.fell_back) == (ended.snapshot_step, None)


def test_a_holder_that_hangs_is_replaced(run: Callable[..., Watched]) -> None:
    job = spec(memory_copy_every_steps=5)
    job_run = run(job)
    job_run.start(plan(*STAGES[0][0], job), 1).result(60)
    wait_copied(job_run, 1)
    (pid,) = job_run.copies.pids("b")
    os.kill(pid, signal.SIGSTOP)
    since = job_run.step
    told = job_run.wait(Uncopied, timeout_s=60)
    assert "given up" in told.why
    wait_copied(job_run, max(since + 6, job_run.step), timeout_s=60)
    assert job_run.copies.pids("b") != [pid]
    assert sum(isinstance(event, Uncopied) for event in job_run.events) == 1, "said once as long as it lasts"
    assert job_run.copies.error is None
