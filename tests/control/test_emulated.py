"""Emulated ranks, message for message, on a clock that the test turns: exact times, moves, deaths, and a new owner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from suika.agent.emulated import EmulatedForks, EmulatedRules, Emulation
from suika.agent.emulated_job import MovePrice
from suika.agent.words import check_event
from suika.control.daemon import Daemon
from suika.control.emulation import Emulated
from suika.core.cluster import parse_cluster_shorthand
from suika.core.decision import Reason, ReasonCode
from suika.core.errors import SpecError
from suika.core.job import Job, JobSpec, JobState, parse_job
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.runtime.gang import COMMAND_ENTRY, RANK_ENTRY
from suika.runtime.outside import ENTRY as OUTSIDE

CLUSTER = parse_cluster_shorthand("2x4:A800")
MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}
SPEED = 10.0


class Prices:
    """A step is 60 / devices s, a launch 30, a save 50, a move 10 beside training, 40 without, 60 to leave."""

    def step_s(self, spec: JobSpec, plan: Plan) -> float:
        return 60.0 / len(plan.devices)

    def launch_s(self, spec: JobSpec, plan: Plan, resumed: bool) -> float:
        return 30.0 + (50.0 if resumed else 0.0)

    def save_s(self, spec: JobSpec, plan: Plan) -> float:
        return 50.0

    def move(self, spec: JobSpec, old: Plan, new: Plan) -> MovePrice:
        return MovePrice(10.0, 40.0, 60.0, 1003, 500)


class Scene:
    """Two emulated nodes, a clock in real seconds, and all that their agents hear."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 0.0, folder
        self.emulation = Emulation(Prices(), SPEED, lambda: self.now)
        self.heard: list[tuple[float, dict[str, Any]]] = []
        self.nodes = {node.name: self._node(node.name) for node in CLUSTER.nodes}

    def _node(self, name: str) -> EmulatedForks:
        forks = self.emulation.node(name)

        def hear(event: dict[str, Any]) -> None:
            if event["event"] != "hello":
                assert check_event(json.loads(json.dumps(event)))
            self.heard.append((self.now * SPEED, event))

        forks.start(hear, lambda: None)
        return forks

    def turn(self, emulated_s: float) -> None:
        """Let so many emulated seconds pass, stopping at everything that happens."""
        until = self.now + emulated_s / SPEED
        while (due := self.emulation.advance()) is not None and due <= until:
            self.now = max(self.now, due)
        self.now = until
        self.emulation.advance()

    def fork(self, plan: Plan, generation: int, **changes: Any) -> None:
        base = {"name": "a", "model": MODEL, "data": "/none", "global_batch": 8, "sequence_length": 16, "steps": 100}
        spec = parse_job(base | {"devices": {"min": 1, "max": 8}, "snapshot_every_steps": 0} | changes)
        for device in plan.devices:
            launch = {"job_id": "j", "device": str(device), "spec": spec.model_dump(mode="json")}
            launch |= {"snapshots": str(self.folder), "program": "suika.train.program:build", "data_path": "/none"}
            order = {"do": "fork", "process": f"j.{generation}.{device}", "entry": RANK_ENTRY, "launch": launch}
            self.nodes[device.node].order(order)

    def tell(self, processes: list[str], do: str, **content: Any) -> None:
        for process in processes:
            node = process.split(".", 2)[2].partition("/")[0]
            message = {"do": do, "job_id": "j", **content}
            self.nodes[node].order({"do": "send", "process": process, "message": message})

    def start(self, plan: Plan, snapshot: str | None = None, **changes: Any) -> list[str]:
        names = [f"j.1.{device}" for device in plan.devices]
        self.fork(plan, 1, **changes)
        self.tell(names, "start", generation=1, plan=plan.to_dict(), store={}, snapshot=snapshot)
        self.turn(0.0)
        return names

    def said(self, say: str) -> list[tuple[float, dict[str, Any]]]:
        messages = [(at_s, event["message"]) for at_s, event in self.heard if event["event"] == "message"]
        return [(at_s, message) for at_s, message in messages if message["say"] == say]

    def exits(self) -> dict[str, tuple[float, int]]:
        return {e["process"]: (at_s, e["code"]) for at_s, e in self.heard if e["event"] == "exit"}


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def plan_on(*texts: str) -> Plan:
    devices = tuple(device for device in CLUSTER.devices if str(device) in texts)
    return Plan(Layout(dp=len(devices)), Placement(devices))


TWO, OTHER_TWO = plan_on("n0/0", "n0/1"), plan_on("n0/1", "n1/0")


def test_steps_end_when_they_should(scene: Scene) -> None:
    scene.start(TWO, steps=7)
    scene.turn(1000.0)
    assert [message["step"] for _, message in scene.said("running")] == [0, 0]
    ends = [(at_s, message["step"]) for at_s, message in scene.said("step")]
    assert ends == [(pytest.approx(30.0 + 30.0 * step), step) for step in range(1, 8)]
    assert [(at_s, m["outcome"]) for at_s, m in scene.said("ended")] == [(pytest.approx(240.0), "finished")] * 2


def test_a_job_in_its_own_environment_is_acted_out_too(scene: Scene) -> None:
    """Its nodes are set up in no time, and its ranks, which would be other programs, are ranks."""
    ours = {"process": "j.setup.1.0.n0", "entry": COMMAND_ENTRY, "launch": {"command": []}}
    command = {"process": "k.1.n0/0", "entry": COMMAND_ENTRY, "launch": {"command": ["x"]}}
    rank = {"process": "j.1.n0/0", "entry": OUTSIDE, "launch": {"entry": RANK_ENTRY}}
    assert [EmulatedRules().refusal(order) is None for order in (ours, command, rank)] == [True, False, True]
    node = scene.nodes["n0"]
    node.order({"do": "fork", **ours})
    node.order({"do": "send", "process": ours["process"], "message": {"do": "setup", "variables": {}}})
    scene.turn(0.1)
    assert [message["generation"] for _, message in scene.said("set-up")] == [1]
    node.order({"do": "send", "process": ours["process"], "message": {"do": "exit"}})
    scene.turn(0.1)
    assert list(scene.exits()) == [ours["process"]]


def test_fast_steps_are_reported_some_at_a_time_and_none_is_lost(scene: Scene) -> None:
    """A report names the step: with steps shorter than the least gap of reports, several ends come with one."""
    scene.emulation.prices.step_s = lambda spec, plan: 0.5  # type: ignore[method-assign]
    scene.start(TWO, steps=1000)
    scene.turn(600.0)
    ends = [(at_s, message["step"]) for at_s, message in scene.said("step")]
    assert all(at_s == pytest.approx(30.0 + 0.5 * step) for at_s, step in ends)
    assert len(ends) < 1000 / 4
    assert ends[0][1] == 1
    assert ends[-1][1] == 1000


def test_a_move_costs_what_it_is_said_to_cost(scene: Scene) -> None:
    old = scene.start(TWO)
    scene.turn(100.0)  # two steps are done, the third is under way
    scene.fork(plan_on("n1/0"), 2)
    joiner, leaver = "j.2.n1/0", "j.1.n0/0"
    everyone = [*old, joiner]
    plans = {"old_generation": 1, "old": TWO.to_dict(), "new": OTHER_TWO.to_dict(), "cluster": {}, "store": {}}
    scene.tell(everyone, "prepare", generation=2, **plans)
    scene.turn(10.0)
    prepared = scene.said("prepared")
    assert [at_s for at_s, _ in prepared] == [pytest.approx(110.0)] * 3
    (digest,) = {message["digest"] for _, message in prepared}
    scene.tell(everyone, "cut", generation=2, digest=digest)
    scene.turn(200.0)
    assert [(at_s, m["step"]) for at_s, m in scene.said("cut")] == [(pytest.approx(120.0), 3)] * 2
    verified = scene.said("verified")
    assert [at_s for at_s, _ in verified] == [pytest.approx(160.0)] * 3
    assert sum(message["received_bytes"] for _, message in verified) == 1003
    assert scene.said("step")[-1][1]["step"] == 3  # training stands until the verdict
    scene.tell(everyone, "commit", generation=2, digest=digest)
    scene.tell([leaver], "exit")
    scene.turn(30.0)
    assert scene.said("step")[-1][0] == pytest.approx(340.0)
    assert (scene.said("step")[-1][1]["step"], scene.said("step")[-1][1]["generation"]) == (4, 2)
    assert scene.exits()[leaver] == (pytest.approx(310.0), 0)


def test_leavers_go_when_they_have_given_everything_away(scene: Scene) -> None:
    old = scene.start(TWO)
    one = plan_on("n0/1")
    plans = {"old_generation": 1, "old": TWO.to_dict(), "new": one.to_dict(), "cluster": {}, "store": {}}
    scene.tell(old, "prepare", generation=2, **plans)
    scene.turn(10.0)
    scene.tell(old, "cut", generation=2)
    scene.turn(90.0)  # cut at 60, verified at 100
    scene.tell(old, "commit", generation=2)
    scene.tell(["j.1.n0/0"], "exit")
    scene.turn(100.0)
    assert scene.exits()["j.1.n0/0"] == (pytest.approx(120.0), 0)


def test_an_aborted_move_leaves_the_old_generation_where_it_was(scene: Scene) -> None:
    old = scene.start(TWO)
    one = plan_on("n0/1")
    plans = {"old_generation": 1, "old": TWO.to_dict(), "new": one.to_dict(), "cluster": {}, "store": {}}
    scene.tell(old, "prepare", generation=2, **plans)
    scene.turn(10.0)
    scene.tell(old, "cut", generation=2)
    scene.turn(70.0)  # cut after the first step, at 60
    scene.tell(old, "abort", generation=2)
    scene.turn(100.0)
    assert [message["generation"] for _, message in scene.said("resumed")] == [2, 2]
    ends = [(at_s, m["step"], m["generation"]) for at_s, m in scene.said("step")]
    assert ends == [(pytest.approx(at_s), step, 1) for at_s, step in ((60.0, 1), (110.0, 2), (140.0, 3), (170.0, 4))]


def test_preempted_and_resumed_from_its_snapshot(scene: Scene) -> None:
    names = scene.start(TWO)
    scene.turn(75.0)
    scene.tell(names, "preempt")
    scene.turn(100.0)
    assert [(at_s, m["step"]) for at_s, m in scene.said("ended")] == [(pytest.approx(140.0), 2)] * 2
    scene.tell(names[:1], "publish", generation=1, step=2)
    scene.turn(0.0)
    ((_, published),) = scene.said("published")
    scene.tell(names, "exit")
    scene.turn(25.0)
    assert scene.exits().keys() == set(names)
    began_s = scene.now * SPEED
    scene.start(OTHER_TWO, snapshot=published["path"])
    scene.turn(115.0)
    assert [m["step"] for _, m in scene.said("running")][-2:] == [2, 2]
    assert scene.said("step")[-1][0] == pytest.approx(began_s + 80.0 + 30.0)
    assert scene.said("step")[-1][1]["step"] == 3


def test_a_killed_rank_stops_the_others_and_a_new_owner_hears_everything(scene: Scene) -> None:
    names = scene.start(TWO)
    scene.turn(100.0)
    scene.heard.clear()
    scene.nodes["n0"].order({"do": "replay", "number": 7})
    scene.turn(0.0)
    hello = scene.heard[0][1]
    assert (hello["asked"], {entry["process"] for entry in hello["processes"]}) == (7, set(names))
    assert scene.said("step")[-1][1]["step"] == 2
    scene.nodes["n0"].order({"do": "kill", "process": names[1]})
    scene.turn(500.0)
    assert scene.exits() == {names[1]: (pytest.approx(100.0), -9)}
    assert scene.said("step")[-1][1]["step"] == 2


def test_a_job_must_lie_in_one_process_and_time_has_its_limit(scene: Scene) -> None:
    scene.fork(TWO, 1)
    order = {"generation": 1, "plan": plan_on("n0/0", "n0/1", "n0/2").to_dict(), "store": {}, "snapshot": None}
    scene.tell(["j.1.n0/0"], "start", **order)
    scene.turn(0.0)
    assert "one agent process" in scene.said("failed")[0][1]["error"]
    with pytest.raises(SpecError, match="speedup"):
        Emulation(Prices(), 61.0)


def test_a_snapshot_of_real_devices_fails_its_job_alone(scene: Scene) -> None:
    real = scene.folder / "step-0000000020.g1"
    real.mkdir()
    scene.start(TWO, snapshot=str(real))
    (said, *_) = [message for _, message in scene.said("failed")]
    assert "is no snapshot of an emulated job" in said["error"]
    scene.emulation.post(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    scene.turn(0.1)
    scene.nodes["n0"].order({"do": "kill", "process": "j.1.n0/0"})
    scene.turn(0.1)
    assert "j.1.n0/0" in scene.exits(), "a fault of one job does not end the emulation"


def test_jobs_of_real_devices_do_not_go_on_on_emulated_ones(tmp_path: Path) -> None:
    real = Daemon(tmp_path)
    spec = {"name": "a", "model": MODEL, "data": "/none", "global_batch": 8, "sequence_length": 16, "steps": 100}
    real.store.add(Job("j1", parse_job(spec), 1.0))
    real.close()
    emulated = Emulated("2x4:A800", 60.0)
    with pytest.raises(SpecError, match=r"1 jobs under way on real devices \(a\)"):
        Daemon(tmp_path, world=emulated)
    again = Daemon(tmp_path)  # nothing is left behind by the refusal
    job = again.store.job("j1")
    again.store.put(job.to(JobState.CANCELLED, Reason(ReasonCode.CANCELLED, "a test"), ended_s=2.0))
    again.close()
    Daemon(tmp_path, world=emulated).close()
