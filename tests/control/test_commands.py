"""Commands in the controller's hands: all or nothing, stopped with grace, restarted within limits, never twice."""

from __future__ import annotations

import pytest
from world import World

from suika.control.pricing import EstimatedPricing
from suika.core.cluster import Cluster, Device, Node, parse_cluster_shorthand
from suika.core.decision import Action
from suika.core.errors import ConflictError, SpecError
from suika.core.job import JobState, parse_job
from suika.runtime.events import Outcome
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load

N0 = ("n0/0", "n0/1", "n0/2", "n0/3")


def test_it_ends_with_its_code(world: World) -> None:
    run = world.start_command("gang", *N0)
    assert world.api.describe("gang")["kind"] == "command"
    run.ended(Outcome.FINISHED, exit_code=0)
    world.turn()
    row = world.api.describe("gang")
    assert (row["state"], row["exit_code"], row["reason"]["code"]) == ("finished", 0, "finished")


def test_it_is_restarted_as_often_as_its_user_allows_and_later_each_time(world: World) -> None:
    run = world.start_command("gang", *N0, max_restarts=2)
    for restart in (1, 2):
        run.ended(Outcome.LOST, exit_code=7)
        world.turn()
        assert world.job("gang").state in (JobState.RECOVERING, JobState.QUEUED)
        view = world.policy.seen[-1].job_of[world.job("gang").id]
        assert view.locked_at(world.now), "it backs off"
        world.turn(2.0**restart + 0.1)
        world.decide(world.grant("gang", *N0))
        assert run.asked[-1][0] == "start"
        assert run.asked[-1][2] == restart + 1, "each start has a generation of its own"
        run.up()
        world.turn()
    assert world.job("gang").state is JobState.RUNNING
    run.ended(Outcome.LOST, exit_code=9)
    world.turn()
    row = world.api.describe("gang")
    assert (row["state"], row["exit_code"]) == ("failed", 9)
    assert "failed after 2 restarts" in row["reason"]["sentence"]


def test_it_never_backs_off_for_longer_than_ten_minutes(world: World) -> None:
    run = world.start_command("gang", *N0, max_restarts=100)
    for _ in range(12):
        run.ended(Outcome.LOST, exit_code=7)
        world.turn()
        until_s = world.policy.seen[-1].job_of[world.job("gang").id].moving_until_s
        assert until_s is not None
        assert until_s <= world.now + 600.0
        world.turn(600.1)
        world.decide(world.grant("gang", *N0))
        run.up()
        world.turn()
    assert world.job("gang").state is JobState.RUNNING


def test_a_preemption_is_no_restart_that_counts(world: World) -> None:
    run = world.start_command("gang", *N0, max_restarts=0)
    for _ in range(3):
        world.decide(world.preempt("gang"))
        assert run.asked[-1] == ("preempt",)
        run.ended(Outcome.PREEMPTED)
        world.turn()
        world.decide(world.grant("gang", *N0))
        run.up()
        world.turn()
    assert world.job("gang").state is JobState.RUNNING
    assert world.job("gang").num_recoveries == 0


def test_a_decision_to_move_it_stops_it_and_starts_it_there(world: World) -> None:
    run = world.start_command("gang", "n0/0", "n0/1")
    world.decide(world.grant("gang", "n1/0", "n1/1"))
    assert run.asked[-1] == ("preempt",)
    assert world.job("gang").state is JobState.PREEMPTING
    run.ended(Outcome.PREEMPTED)
    world.turn()
    assert world.job("gang").state is JobState.QUEUED
    world.decide(world.grant("gang", "n1/0", "n1/1"))
    assert [str(d) for d in run.asked[-1][1].devices] == ["n1/0", "n1/1"]


def test_b08_what_may_run_on_a_lost_node_keeps_it_from_beginning_again(world: World) -> None:
    """Lost with its node: until `outage_s` is over, when the old ranks are gone for sure, no second incarnation."""
    run = world.start_command("gang", *N0, outage_s=50)
    lost_s = world.now
    run.ended(Outcome.LOST, dead=(Device("n0", 0),), unreachable=True)
    world.turn()
    world.turn(15)
    assert world.job("gang").not_before_s == lost_s + 50
    assert "outage_s" in world.api.explain("gang")["reason"]["sentence"]
    world.decide(world.grant("gang", "n1/0", "n1/1", "n1/2", "n1/3"))
    assert world.job("gang").state is JobState.QUEUED, "whatever the policy wants"
    world.turn(36)
    world.decide(world.grant("gang", "n1/0", "n1/1", "n1/2", "n1/3"))
    assert world.job("gang").state is JobState.STARTING
    assert run.asked[-1][:1] == ("start",)
    run.ended(Outcome.LOST, dead=(Device("n1", 0),))  # its node is there and says that it is gone
    world.turn()
    assert world.job("gang").not_before_s == lost_s + 50, "nothing to wait for"


@pytest.mark.parametrize("policy", ["never", None])
def test_never_means_never(world: World, policy: str | None) -> None:
    run = world.start_command("gang", *N0, preemption={"policy": policy})
    training = world.start("train", "n1/0", preemption={"policy": policy})
    world.decide(world.preempt("gang"), world.preempt("train"))
    stopped = policy is None
    assert (("preempt",) in run.asked) == (("preempt",) in training.asked) == stopped
    if not stopped:
        world.decide(world.grant("gang", "n1/1", "n1/2", "n1/3", "n1/0"), world.grant("train", "n1/1"))
        assert run.asked[-1][0] == "start", "a command that is never stopped is not moved either"
        assert training.asked[-1][0] == "redeploy", "a training job may be moved live"


def test_it_keeps_its_size(world: World) -> None:
    world.start_command("gang", *N0)
    with pytest.raises(SpecError, match="rigid"):
        world.api.resize("gang", devices="2")


def test_b75_too_many_devices_are_refused_at_once(world: World) -> None:
    world.controller.pricing = EstimatedPricing(world.cluster)
    for num, text in ((9, "9 of 8 devices"), (73, "73 of 8 devices")):
        with pytest.raises(SpecError, match=text):
            world.api.submit(world.command("gang", num))
    with pytest.raises(SpecError, match="known: cpu"):
        world.api.submit(world.command("gang", 1) | {"devices": {"min": 1, "max": 1, "type": "H100"}})
    with pytest.raises(SpecError, match="lower-case"):
        world.api.submit(world.command("x" * 64, 1))
    assert world.api.jobs(all=True) == []
    assert world.api.submit(world.command("gang", 8), dry_run=True)["options"][0]["shape"] == [4, 4]


def test_b63_the_same_command_again_is_the_same_job(world: World) -> None:
    file = world.command("gang", 4, environment={"variables": {"A": "1"}})
    first = [world.api.submit(file, request_id="r") for _ in range(4)]
    assert len({row["id"] for row in first}) == 1
    assert len(world.store.jobs()) == 1
    with pytest.raises(ConflictError):
        world.api.submit(file | {"environment": {"variables": {"A": "2"}}}, request_id="r")


def test_every_policy_schedules_it_as_a_rigid_gang(world: World) -> None:
    """The same cycle for both kinds: a gang of six over two nodes, and training jobs that shrink for it."""
    world.controller.pricing = world.controller.actor.pricing = EstimatedPricing(world.cluster)
    world.start("train", *N0, "n1/0", "n1/1", "n1/2", "n1/3", steps=10**9)
    world.api.submit(world.command("gang", 6, expected_s=5))
    world.turn()
    snapshot = world.policy.seen[-1]
    gang = world.job("gang").id
    for name in ("suika", "srtf", "pollux", "sia", "gavel"):
        result = run_cycle(snapshot, load(name))
        mine = [d for d in result.decisions if d.job_id == gang]
        assert all(len(d.devices) == 6 and d.action is Action.START for d in mine), name
    starts = [d for d in run_cycle(snapshot, load("suika")).decisions if d.job_id == gang]
    assert starts, "a short gang is worth a shrink"


def test_its_price_is_what_its_user_expects() -> None:
    pricing = EstimatedPricing(parse_cluster_shorthand("3x4:cpu"))
    spec = parse_job({"name": "gang", "command": ["x"], "devices": {"min": 6, "max": 6}, "expected_s": 100})
    curve = pricing.curve(spec)
    assert [(option.num_devices, option.step_s) for option in curve.options] == [(6, 100.0)] * len(curve.options)
    assert curve.options[0].shape == (4, 2)
    assert pricing.curve(spec.model_copy(update={"name": "other"})) is curve


def test_a_node_whose_type_nobody_knows_runs_commands_and_harms_no_other_job(world: World) -> None:
    cluster = world.controller.state.cluster = Cluster((Node("n0", 4, "cpu"), Node("n1", 4, "home-made")))
    pricing = world.controller.pricing = world.controller.actor.pricing = EstimatedPricing(cluster)
    spec = parse_job(world.file("train", devices={"min": 1, "max": 8}))
    assert {option.device_type for option in pricing.curve(spec).options} == {"cpu"}
    world.submit("train", devices={"min": 1, "max": 8})
    world.api.submit(world.command("gang", 2) | {"devices": {"min": 2, "max": 2, "type": "home-made"}})
    world.turn()
    world.decide(world.grant("gang", "n1/0", "n1/1"))
    assert world.job("gang").state is JobState.STARTING
    with pytest.raises(SpecError, match="unknown device type"):
        world.submit("other", devices={"min": 1, "max": 2, "type": "home-made"})
