"""The cycle: what no policy may do is refused; what remains is ordered by who waits for whose devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedule_cases import Flat, after, check_floor, curve, job, on, snapshot

from suika.core.cluster import Device
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.layout import Layout
from suika.core.quota import Quota
from suika.core.snapshot import JobView, Snapshot
from suika.schedule.cycle import CycleResult, run_cycle
from suika.schedule.policies import load

WHY = Reason(ReasonCode.START, "because")


@dataclass(frozen=True)
class Says:
    """A policy that says what it is told."""

    decisions: tuple[Decision, ...]
    name: str = "says"
    round_s: float = 0.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        return list(self.decisions)


def give(job_id: str, *devices: str, action: Action = Action.START) -> Decision:
    held = tuple(Device.parse(text) for text in devices)
    return Decision(job_id, action, WHY, Layout(dp=len(held)), held)


def move(job_id: str, *devices: str) -> Decision:
    return give(job_id, *devices, action=Action.REDEPLOY)


def stop(job_id: str) -> Decision:
    return Decision(job_id, Action.PREEMPT, WHY)


def cycle(state: Snapshot, *decisions: Decision) -> CycleResult:
    return run_cycle(state, Says(decisions))


def codes(result: CycleResult) -> dict[str, str]:
    return {decision.job_id: str(reason.code) for decision, reason in result.rejected}


def test_what_no_policy_may_do_is_refused_with_a_reason():
    state = snapshot(
        "2x4:cpu",
        job("new", max_devices=4, known=curve((1, 2, 4), node=4)),
        on(job("old", known=curve((1, 2, 4), node=4)), "n0/0"),
        on(job("moving", moving_until_s=200.0), "n0/1"),
        job("fixed", fixed_layout=Layout(tp=2)),
        down=frozenset({Device("n1", 3)}),
        draining=frozenset({"n0"}),
    )
    refused = {
        "unsatisfiable": give("nobody", "n1/0"),
        "move-in-flight": move("moving", "n1/0"),
        "queued": give("old", "n1/0"),
        "device-lost": give("new", "n1/3"),
        "user": give("fixed", "n1/0", "n1/1"),
    }
    for code, decision in refused.items():
        assert codes(cycle(state, decision)) == {decision.job_id: code}
    assert codes(cycle(state, give("new", "n0/2"))) == {"new": "device-lost"}  # a draining node
    assert codes(cycle(state, give("new", *(f"n1/{i}" for i in range(3)), "n0/3", "n0/2"))) == {"new": "unsatisfiable"}
    assert codes(cycle(state, give("new", "n1/0"), move("old", "n1/0"))) == {"old": "no-free-devices"}


def test_a_step_waits_for_whom_it_takes_devices_from():
    state = snapshot("1x4:cpu", on(job("a"), "n0/0", "n0/1"), on(job("b"), "n0/2"), job("c", submitted_s=1.0))
    result = cycle(state, give("c", "n0/1"), move("a", "n0/0"))
    assert [(s.decision.job_id, s.after) for s in result.steps] == [("a", ()), ("c", ("a",))]
    # A device whose holder keeps it cannot be given away.
    assert codes(cycle(state, give("c", "n0/2"))) == {"c": "no-free-devices"}


def test_rejection_takes_dependants_along():
    state = snapshot("1x4:cpu", on(job("a"), "n0/0"), on(job("b"), "n0/1"), job("c", submitted_s=1.0))
    result = cycle(state, give("c", "n0/0"), move("a", "n0/1"))
    assert not result.steps
    assert set(codes(result)) == {"a", "c"}


def test_a_swap_is_broken_by_a_shrink_if_an_option_allows():
    sizes = curve((1, 2, 3, 4), node=4)
    a, b = on(job("a", known=sizes), "n0/0", "n0/1"), on(job("b", known=sizes), "n0/2", "n0/3")
    result = cycle(snapshot("1x4:cpu", a, b), move("a", "n0/0", "n0/2"), move("b", "n0/1", "n0/3"))
    # `a` first lets go of n0/1; then `b` can take it; `a` goes on in a later cycle.
    assert [(s.decision.job_id, s.decision.devices, s.after) for s in result.steps] == [
        ("a", (Device("n0", 0),), ()),
        ("b", (Device("n0", 1), Device("n0", 3)), ("a",)),
    ]
    assert result.unfinished
    assert result.steps[0].decision.reason.code is ReasonCode.SHRINK


def test_a_full_swap_is_broken_by_a_stop():
    a, b = on(job("a"), "n0/0"), on(job("b"), "n1/0")
    result = cycle(snapshot("2x1:cpu", a, b), move("a", "n1/0"), move("b", "n0/0"))
    assert [(s.decision.job_id, s.decision.action, s.after) for s in result.steps] == [
        ("b", Action.PREEMPT, ()),
        ("a", Action.REDEPLOY, ("b",)),
    ]
    assert result.unfinished
    assert "circle" in result.waits["b"].sentence


def test_a_full_swap_stops_nobody_who_may_not_be_stopped():
    a, b = on(job("a"), "n0/0"), replace(on(job("b"), "n1/0"), stoppable=False)
    swap = move("a", "n1/0"), move("b", "n0/0")
    result = cycle(snapshot("2x1:cpu", a, b), *swap)
    assert [(s.decision.job_id, s.decision.action) for s in result.steps] == [
        ("a", Action.PREEMPT),
        ("b", Action.REDEPLOY),
    ]
    result = cycle(snapshot("2x1:cpu", replace(a, stoppable=False), b), *swap)
    assert not result.steps
    assert [(d.job_id, r.code) for d, r in result.rejected] == [(name, ReasonCode.NO_FREE_DEVICES) for name in "ba"]
    assert "none of them may be stopped" in result.rejected[0][1].sentence
    assert not result.unfinished


@dataclass(frozen=True)
class Backwards(Flat):
    """Least moves if the last device comes first."""

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices[::-1]


def test_ranks_of_a_move_stand_where_the_least_moves():
    """Whatever order a policy says; a start's is as said."""
    state = snapshot("1x4:cpu", on(job("a"), "n0/0"), job("b", submitted_s=1.0), move_cost=Backwards())
    steps = cycle(state, move("a", "n0/0", "n0/1"), give("b", "n0/2", "n0/3")).steps
    assert [[device.index for device in step.decision.devices] for step in steps] == [[1, 0], [2, 3]]


def test_promised_devices_set_the_earliest_time():
    state = snapshot("1x2:cpu", job("a", max_devices=2), promised={Device("n0", 1): 130.0})
    assert cycle(state, give("a", "n0/1")).steps[0].not_before_s == 130.0


def test_a_maximum_cuts_down_whoever_has_the_last_claim():
    state = snapshot("1x8:cpu", job("a"), job("b"), quotas={"default": Quota(max=3)})
    result = cycle(state, give("a", "n0/0", "n0/1"), give("b", "n0/2", "n0/3"))
    assert {view.id: len(view.devices) for view in after(result).jobs} == {"a": 2, "b": 1}
    assert "may hold 3 devices" in result.steps[1].decision.reason.sentence


def test_every_waiting_job_has_one_reason():
    state = snapshot(
        "2x8:cpu",
        on(job("big"), *(f"n0/{i}" for i in range(8))),
        on(job("half"), *(f"n1/{i}" for i in range(6))),
        job("impossible", min_devices=3, max_devices=3),
        job("large", min_devices=8, max_devices=8),
        job("rich", tenant="full", min_devices=2),
        quotas={"full": Quota(max=1)},
    )
    waits = cycle(state).waits
    assert {name: str(reason.code) for name, reason in waits.items()} == {
        "impossible": "unsatisfiable",
        "large": "no-free-devices",
        "rich": "quota",
    }
    assert all(reason.sentence for reason in waits.values())


def test_free_in_sum_but_not_where_needed_is_told_as_fragmented():
    state = snapshot(
        "2x8:cpu",
        on(job("a"), *(f"n0/{i}" for i in range(4))),
        on(job("b"), *(f"n1/{i}" for i in range(4))),
        job("node", min_devices=8, max_devices=8, known=curve((8,))),
    )
    whole = snapshot(state.cluster, *state.jobs[:2], job("node", min_devices=8, max_devices=8, known=_one_node()))
    assert str(cycle(whole).waits["node"].code) == "fragmented"


def _one_node():
    eight = curve((8,))
    return type(eight)(tuple(option for option in eight.options if option.shape == (8,)))


def test_two_gangs_of_the_whole_cluster_never_hold_half_each():
    """B19: exactly one starts, the other holds nothing, in every round and under every policy."""
    from schedule_cases import POLICIES

    known = curve((100,), node=1)
    a, b = (job(n, min_devices=100, max_devices=100, known=known, requested_devices=100) for n in "ab")
    for name in POLICIES:
        state = snapshot("100x1:cpu", a, b)
        for round_ in range(5):
            state = after(run_cycle(state, load(name)), now_s=200.0 + round_)
            check_floor(state)
            assert sorted(len(view.devices) for view in state.jobs) == [0, 100], name


def test_of_two_that_could_grow_exactly_one_does():
    """B19, second part: 4 free devices, both could go from 8 to 12."""
    known = curve((8, 12), power=1.0, node=4)
    state = snapshot(
        "5x4:cpu",
        on(job("a", 1e6, known), *(f"n{n}/{i}" for n in (0, 1) for i in range(4))),
        on(job("b", 1e6, known), *(f"n{n}/{i}" for n in (2, 3) for i in range(4))),
        move_cost=Flat(1.0),
    )
    grown = after(run_cycle(state, load("suika")))
    check_floor(grown)
    assert sorted(len(view.devices) for view in grown.jobs) == [8, 12]
