"""The reconcile loop against scripted runs: every state of a job, waves of moves, failures, drains, users' wishes."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import ScriptedPolicy, World

from suika.core.cluster import Device
from suika.core.errors import SpecError
from suika.core.job import Job, JobState
from suika.core.layout import Layout
from suika.runtime.events import Outcome

D = Device.parse


def test_a_job_from_submission_to_its_end(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    assert run.asked == [("start", world.job("a").plan, 1, None)]
    run.steps(7)
    world.turn()
    assert world.job("a").state is JobState.RUNNING
    assert world.job("a").steps_done == 8
    assert world.api.describe("a")["step_s"] == pytest.approx(0.1)
    run.ended(Outcome.FINISHED)
    world.turn()
    assert world.job("a").state is JobState.FINISHED
    assert world.controller.state.watch(world.job("a").id).held == ()
    assert [k for k in world.kinds("a") if k.startswith("job-")] == ["job-starting", "job-running", "job-finished"]


def test_a_waiting_job_says_why(world: World) -> None:
    world.start("a", *[f"n{n}/{i}" for n in range(2) for i in range(4)])
    world.submit("b")
    world.turn()
    told = world.api.explain("b")
    assert told["state"] == "queued"
    assert told["reason"]["code"] == "no-free-devices"
    assert "0 free" in told["reason"]["sentence"]
    # What it could have, and what was tried out to give it something else: in the words of a simulated job.
    assert told["options"]
    assert told["waits_for"]["free_now"] == 0
    assert "one more node" in [row["change"] for row in told["would_change"]] + told["without_effect"]


def test_a_move_is_committed_once_and_its_old_devices_come_free_at_release(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.decide(world.grant("a", "n1/0", "n1/1"))
    job = world.job("a")
    assert (job.state, job.generation, job.last_generation) == (JobState.REDEPLOYING, 1, 2)
    assert world.controller.state.releasing.keys() == {D("n0/0"), D("n0/1")}
    # While it moves, the policy sees it where it is going, locked, and the old devices promised.
    world.decide()
    view = world.policy.seen[-1].job_of[job.id]
    assert view.devices == (D("n1/0"), D("n1/1"))
    assert view.moving_until_s > world.now
    assert set(world.policy.seen[-1].promised) == {D("n0/0"), D("n0/1")}
    assert run.moved(release=False)
    world.turn()
    job = world.job("a")
    assert (job.state, job.generation, job.num_moves, job.target) == (JobState.RUNNING, 2, 1, None)
    assert world.controller.state.releasing.keys() == {D("n0/0"), D("n0/1")}
    run.released({D("n0/0"), D("n0/1")})
    world.turn()
    assert not world.controller.state.releasing


def test_who_needs_anothers_devices_starts_at_their_release_not_before(world: World) -> None:
    a = world.start("a", "n0/0", "n0/1")
    world.submit("b")
    world.decide(world.grant("a", "n0/0"), world.grant("b", "n0/1"))
    assert world.job("b").state is JobState.QUEUED
    assert world.api.explain("b")["reason"]["sentence"].endswith("(waits until a has given up its devices)")
    a.moved(release=False)
    world.turn()
    assert "b" not in world.runs
    a.released({D("n0/1")})
    world.turn()
    assert world.job("b").state is JobState.STARTING
    assert world.runs["b"].plan.devices == (D("n0/1"),)


def test_a_failed_move_cancels_what_depends_on_it_and_is_not_tried_again_at_once(world: World) -> None:
    a = world.start("a", "n0/0", "n0/1")
    b = world.start("b", "n1/0")
    world.submit("c")
    # c waits for b, b waits for a.
    world.decide(world.grant("a", "n0/0"), world.grant("b", "n0/1"), world.grant("c", "n1/0"))
    a.aborted("a joiner died")
    world.turn()
    assert world.job("a").state is JobState.RUNNING
    assert world.job("a").generation == 1
    assert not world.controller.state.waiting
    assert not world.controller.state.releasing
    assert world.kinds("b").count("decision-cancelled") == 1
    assert world.kinds("c").count("decision-cancelled") == 1
    assert ("redeploy",) not in [asked[:1] for asked in b.asked]
    # Left alone for a while: a decision about it is refused, and allowed later. Its number is not used again.
    world.decide(world.grant("a", "n0/0"))
    assert world.job("a").state is JobState.RUNNING
    world.turn(seconds=3.0)
    world.decide(world.grant("a", "n0/0"))
    assert world.job("a").last_generation == 3


def test_joiners_that_go_first_do_not_give_away_what_the_old_ranks_still_hold(world: World) -> None:
    a = world.start("a", "n0/0", "n0/1")
    world.submit("b")
    world.decide(world.grant("a", "n1/0"), world.grant("b", "n0/1"))
    a.released({D("n1/0")})  # a joiner of a move that is being called off; the loop hears of it on its own
    world.turn()
    assert "b" not in world.runs
    a.aborted("a joiner died")
    world.turn()
    assert "b" not in world.runs
    assert world.kinds("b").count("decision-cancelled") == 1
    assert world.job("a").plan.devices == (D("n0/0"), D("n0/1"))


def test_a_cancelled_job_does_not_commit_and_never_comes_back(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.decide(world.grant("a", "n0/0"))
    world.api.cancel("a")
    assert ("kill",) in run.asked
    assert run.moved() is False
    world.turn()
    assert world.job("a").state is JobState.CANCELLED
    assert world.job("a").plan.devices == (D("n0/0"), D("n0/1"))
    # Nobody gets its devices until its processes are gone.
    world.submit("b")
    world.decide(world.grant("b", "n0/0"))
    assert "b" not in world.runs
    run.ended(Outcome.KILLED)
    world.turn()
    assert run.closed
    assert world.job("a").state is JobState.CANCELLED
    assert world.runs["b"].plan.devices == (D("n0/0"),)


def test_a_killed_rank_costs_the_steps_since_the_snapshot_and_its_device(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    run.steps(10)
    run.saved(6)
    run.steps(3)
    run.ended(Outcome.LOST, saved=6, dead=(D("n0/1"),))
    world.turn()
    job = world.job("a")
    assert (job.state, job.steps_done) == (JobState.QUEUED, 6)
    event = next(e for e in world.store.events(job_id=job.id) if e.kind == "recovering")
    assert event.data["lost_steps"] == 8
    assert "goes on from step 6" in next(e for e in world.store.events() if e.kind == "job-recovering").data["sentence"]
    assert set(world.policy.seen[-1].down) == {D("n0/1")}
    world.decide(world.grant("a", "n0/0"))
    assert run.asked[-1] == ("start", world.job("a").plan, 2, "/snapshots/6")
    run.started(step=7)
    run.steps(1)
    world.turn(seconds=11)
    assert world.job("a").steps_done == 8
    assert not world.controller.state.down  # set aside for a while, then offered again


def test_a_job_that_only_dies_is_given_up(world: World) -> None:
    run = world.start("a", "n0/0")
    for _ in range(6):
        run.ended(Outcome.LOST, dead=(D("n0/0"),))
        world.turn()
        if world.job("a").state is JobState.FAILED:
            break
        world.turn(seconds=11)  # the device is back
        world.decide(world.grant("a", "n0/0"))
        run.started()
        world.turn()
    assert world.job("a").state is JobState.FAILED
    assert world.job("a").num_recoveries == 6
    assert run.closed


def test_decisions_that_wait_for_a_lost_device_are_dropped(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.submit("b")
    world.decide(world.grant("a", "n0/0"), world.grant("b", "n0/1"))
    run.ended(Outcome.LOST, dead=(D("n0/1"),))
    world.turn()
    assert "decision-cancelled" in world.kinds("b")
    assert world.job("b").state is JobState.QUEUED


def test_preempted_and_resumed_from_what_it_saved(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    run.steps(5)
    world.decide(world.preempt("a"))
    assert world.job("a").state is JobState.PREEMPTING
    run.ended(Outcome.PREEMPTED, saved=6)
    world.turn()
    assert (world.job("a").state, world.job("a").steps_done) == (JobState.QUEUED, 6)
    world.decide(world.grant("a", "n1/0"))
    assert run.asked[-1][0] == "start"
    assert run.asked[-1][2:] == (2, "/snapshots/6")


@pytest.mark.parametrize(("outcome", "state"), [(Outcome.FINISHED, "finished"), (Outcome.FAILED, "failed")])
@pytest.mark.parametrize("meanwhile", ["preempt", "move"])
def test_a_job_that_ends_while_something_is_done_to_it_has_ended(
    world: World, outcome: Outcome, state: str, meanwhile: str
) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.decide(world.preempt("a") if meanwhile == "preempt" else world.grant("a", "n1/0"))
    run.ended(outcome)
    world.turn()
    assert world.job("a").state == state
    assert all(d["state"] == "free" for node in world.api.nodes() for d in node["devices"])


def test_a_wish_that_lacks_devices_is_explained(world: World) -> None:
    world.start("a", "n0/0", "n0/1")
    world.start("b", "n0/2", "n0/3")
    world.start("c", "n1/0", "n1/1", "n1/2", "n1/3")
    world.api.resize("a", layout="tp=2,pp=2")
    world.turn()
    assert world.api.explain("a")["reason"]["sentence"].endswith(
        "its user wants tp2 pp2 dp1, which waits for free devices"
    )


def test_a_report_of_an_old_generation_changes_nothing(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.decide(world.grant("a", "n0/0"))
    run.moved()
    world.turn()
    run.generation = 1
    run.steps(5)
    run.started()
    world.turn()
    assert world.job("a").steps_done == 1
    assert world.job("a").state is JobState.RUNNING


def test_a_users_layout_and_range_reach_the_policy(world: World) -> None:
    world.start("a", "n0/0", "n0/1")
    world.api.resize("a", layout="tp=2,pp=2,dp=1")
    world.turn()
    view = world.policy.seen[-1].job_of[world.job("a").id]
    assert view.fixed_layout == Layout(tp=2, pp=2)
    world.api.resize("a", devices="3:4")
    world.turn()
    view = world.policy.seen[-1].job_of[world.job("a").id]
    assert (view.fixed_layout, view.min_devices, view.max_devices) == (None, 3, 4)
    with pytest.raises(SpecError, match="asks for 9 of 8 devices"):
        world.api.resize("a", devices="9")
    with pytest.raises(SpecError, match=r"layers\(4\) < pipeline chunks\(5\)"):
        world.api.resize("a", layout="pp=5")


def test_a_dry_resize_shows_bytes_links_pause_and_memory_and_changes_nothing(world: World) -> None:
    world.start("a", "n0/0", "n0/1")
    world.start("b", "n1/0")
    before = world.job("a")
    shrunk = world.api.resize("a", devices="1", dry_run=True)
    assert (shrunk["moved_bytes"], shrunk["new"]["devices"]) == (shrunk["links"][0]["bytes"], ["n0/0"])
    grown = world.api.resize("a", layout="tp=2,pp=2", dry_run=True)
    assert len(grown["new"]["devices"]) == 4
    assert "n1/0" not in grown["new"]["devices"], "another job's"
    assert sum(link["bytes"] for link in grown["links"]) >= grown["moved_bytes"] > 0
    assert sum(link["bytes"] for link in grown["links"] if link["network"]) == grown["network_bytes"]
    assert grown["predicted_release_s"] > grown["predicted_pause_s"] > 0
    keep, lean = grown["modes"]["keep"], grown["modes"]["lean"]
    assert set(keep["peak_bytes"]) == {*grown["old"]["devices"], *grown["new"]["devices"]}
    assert set(keep["needed_bytes"]) == {device.partition("/")[0] for device in keep["peak_bytes"]}
    assert sum(lean["peak_bytes"].values()) > 0
    assert set(lean["needed_bytes"]) == set(keep["needed_bytes"])
    assert world.job("a") == before
    with pytest.raises(SpecError, match="only 7 devices are its own or free"):
        world.api.resize("a", layout="tp=2,pp=4", dry_run=True)


def test_many_resizes_at_once_are_decided_once_with_the_last(world: World) -> None:
    world.start("a", "n0/0", "n0/1")
    before = len(world.policy.seen)
    for n in (1, 2, 3, 4):
        world.api.resize("a", devices=str(n))
    world.turn()
    assert len(world.policy.seen) == before + 1
    assert world.policy.seen[-1].job_of[world.job("a").id].max_devices == 4


def test_drain_and_return(world: World) -> None:
    assert world.api.drain("n1")["draining"]
    world.turn()
    assert world.policy.seen[-1].draining == {"n1"}
    assert not world.api.drain("n1", undo=True)["draining"]
    with pytest.raises(SpecError, match="not in the cluster"):
        world.api.drain("n7")


def test_a_retried_submission_is_one_job(world: World) -> None:
    body = world.file("a")
    first = world.api.submit(body, request_id="r1")
    assert [world.api.submit(body, request_id="r1")["id"] for _ in range(3)] == [first["id"]] * 3
    with pytest.raises(SpecError, match="used for another job"):
        world.api.submit(world.file("a", steps=7), request_id="r1")
    with pytest.raises(SpecError, match="still active"):
        world.api.submit(body, request_id="r2")
    assert len(world.store.jobs()) == 1


def test_nodes_show_who_holds_what(world: World) -> None:
    world.start("a", "n0/0", "n0/1")
    world.decide(world.grant("a", "n0/0"))
    devices = {d["device"]: (d["state"], d["jobs"]) for node in world.api.nodes() for d in node["devices"]}
    assert devices["n0/0"] == ("used", ["a"])
    assert devices["n0/1"] == ("releasing", ["a"])
    assert devices["n1/3"] == ("free", [])


def test_data_that_cannot_be_prepared_fails_the_job_with_the_reason(world: World) -> None:
    def refuse(job: object) -> None:
        raise SpecError("data", "x", "holds no text")

    world.prepare = refuse
    world.submit("a")
    world.decide(world.grant("a", "n0/0"))
    assert world.job("a").state is JobState.FAILED
    assert "holds no text" in world.job("a").reason.sentence
    assert world.controller.state.watch(world.job("a").id).held == ()


def test_a_policy_that_works_in_rounds_is_asked_though_nothing_happened(tmp_path: Path) -> None:
    class Rounds(ScriptedPolicy):
        round_s = 30.0

    world = World(tmp_path, Rounds())
    world.turn()
    before = len(world.policy.seen)
    world.turn(seconds=29)
    assert len(world.policy.seen) == before
    world.turn(seconds=2)
    assert len(world.policy.seen) == before + 1
    world.controller.close()


def test_a_commit_that_comes_between_reading_and_writing_does_not_lose_a_users_wish(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.decide(world.grant("a", "n0/0"))
    real, raced = world.store.put, []

    def put(job: Job) -> None:
        if not raced:
            raced.append(job)
            run.move[3]()  # the move commits just now
        real(job)

    world.store.put = put
    world.controller.start()
    world.api.resize("a", devices="1:2")
    assert world.job("a").generation == 2
    assert world.job("a").spec.devices.max == 2
