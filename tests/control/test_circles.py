"""Moves in a circle on a live cluster: one job gives way first, and goes on without anybody asking again for it."""

from __future__ import annotations

from pathlib import Path

from world import World

from suika.core.cluster import Device
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import Snapshot
from suika.runtime.events import Outcome


class Wants:
    """A policy that wants each job on certain devices, and says so whenever one that is not there may be moved."""

    name = "wants"
    round_s = 0.0

    def __init__(self) -> None:
        self.wanted: dict[str, tuple[Device, ...]] = {}
        self.asked = 0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        self.asked += 1
        made = []
        for job in snapshot.jobs:
            wanted = self.wanted.get(job.id, job.devices)
            if set(wanted) != set(job.devices) and not job.locked_at(snapshot.now_s):
                action = Action.REDEPLOY if job.running else Action.START
                made.append(
                    Decision(job.id, action, Reason(ReasonCode.MIGRATE, "wanted there"), Layout(dp=len(wanted)), wanted)
                )
        return made


def test_two_jobs_change_places(tmp_path: Path) -> None:
    policy = Wants()
    world = World(tmp_path, policy)
    nodes = [tuple(Device(f"n{n}", i) for i in range(4)) for n in range(2)]
    for name, devices in zip("ab", nodes, strict=True):
        policy.wanted[world.submit(name)] = devices
        world.turn()
        world.runs[name].started()
        world.turn()
    a, b = (world.job(name).id for name in "ab")
    policy.wanted = {a: nodes[1], b: nodes[0]}
    world.controller.state.changed = True  # the only time that the test asks for a cycle
    world.turn()
    asked = policy.asked
    stopping = next(name for name in "ab" if world.job(name).state is JobState.PREEMPTING)
    other = "b" if stopping == "a" else "a"
    assert world.runs[stopping].asked[-1] == ("preempt",)
    assert len(world.runs[other].asked) == 1, "it waits for the release"
    world.runs[stopping].ended(Outcome.PREEMPTED, saved=1)
    world.turn()
    assert world.runs[other].asked[-1][0] == "redeploy"
    world.runs[other].moved()
    world.turn()
    assert world.runs[stopping].asked[-1][0] == "start"
    world.runs[stopping].started(2)
    world.turn(1.0)
    assert {name: set(world.job(name).plan.devices) for name in "ab"} == {"a": set(nodes[1]), "b": set(nodes[0])}
    assert {world.job(name).state for name in "ab"} == {JobState.RUNNING}
    assert policy.asked > asked
