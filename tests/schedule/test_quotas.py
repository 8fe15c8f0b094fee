"""Tenants' quotas: maxima, guarantees with borrowing and reclaim, and guarantees of whole nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from schedule_cases import POLICIES, Flat, after, check_floor, curve, job, on, random_snapshot, snapshot

from suika.core.cluster import parse_cluster_shorthand
from suika.core.decision import Action
from suika.core.errors import SpecError
from suika.core.quota import Quota, check_quotas, parse_quotas
from suika.core.snapshot import JobView, Snapshot
from suika.schedule.cycle import CycleResult, run_cycle
from suika.schedule.policies import load

ONE_TO_8 = curve((1, 2, 3, 4, 5, 6, 7, 8))


def span(node: int, first: int, last: int) -> list[str]:
    return [f"n{node}/{i}" for i in range(first, last)]


def held(state: Snapshot) -> dict[str, int]:
    """Devices per tenant."""
    found: dict[str, int] = {}
    for view in state.jobs:
        found[view.tenant] = found.get(view.tenant, 0) + len(view.devices)
    return found


def decide(state: Snapshot, policy: str = "suika") -> CycleResult:
    result = run_cycle(state, load(policy))
    check_floor(after(result))
    return result


def gang(name: str, num: int, tenant: str, **changes: object) -> JobView:
    """A rigid job of `num` devices, long enough to be worth any move."""
    steps = changes.pop("steps", 1e6)
    known = curve(tuple(range(num, num + 1)), power=1.0)
    base = {"min_devices": num, "max_devices": num, "requested_devices": num, "tenant": tenant}
    return job(name, steps, known, **(base | changes))  # type: ignore[arg-type]


# -- borrowing and reclaim ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_borrows_what_others_do_not_use(policy: str):
    quotas = {"red": Quota(guarantee=4), "blue": Quota(guarantee=4)}
    state = snapshot("1x8:cpu", gang("a", 4, "red"), gang("b", 4, "red", submitted_s=1.0), quotas=quotas)
    assert held(after(decide(state, policy))) == {"red": 8}


@pytest.mark.parametrize("policy", POLICIES)
def test_an_owner_gets_its_devices_back(policy: str):
    """Under every policy: red borrowed all; blue comes with a long job that no policy would prefer."""
    quotas = {"red": Quota(guarantee=4), "blue": Quota(guarantee=4)}
    short = [on(gang(f"r{i}", 2, "red", steps=400.0 + i), *span(0, 2 * i, 2 * i + 2)) for i in range(4)]
    owner = gang("owner", 4, "blue", steps=1e7, submitted_s=50.0)
    result = decide(snapshot("1x8:cpu", *short, owner, quotas=quotas), policy)
    assert held(after(result)) == {"red": 4, "blue": 4}
    stopped = [s.decision for s in result.steps if s.decision.action is Action.PREEMPT]
    assert len(stopped) == 2
    start = next(s for s in result.steps if s.decision.job_id == "owner")
    assert set(start.after) == {d.job_id for d in stopped}
    # Asked again at once, nothing changes: no ping-pong between the policy and the quotas.
    assert not run_cycle(after(result), load(policy)).steps


def test_what_is_borrowed_is_given_back_by_shrinking_first():
    borrower = on(
        job("big", 1e6, curve((2, 4, 6, 8), power=1.0), min_devices=2, max_devices=8, tenant="red"), *span(0, 0, 8)
    )
    owner = gang("owner", 4, "blue", steps=1e8, submitted_s=5.0)
    quotas = {"red": Quota(guarantee=2), "blue": Quota(guarantee=4)}
    result = decide(snapshot("1x8:cpu", borrower, owner, quotas=quotas))
    assert {view.id: len(view.devices) for view in after(result).jobs} == {"big": 4, "owner": 4}
    kept = next(view for view in after(result).jobs if view.id == "big").devices
    assert set(kept) <= set(borrower.devices), "it shrinks in place"


def test_a_borrowed_part_goes_before_anything_that_is_covered():
    """Red holds 12 for a guarantee of 8 in two jobs of 6: it gives back a part, and neither stops."""
    known = curve((4, 5, 6), power=1.0)
    red = [on(job(f"r{i}", 1e6, known, min_devices=4, max_devices=6, tenant="red"), *span(i, 0, 6)) for i in range(2)]
    owner = gang("owner", 4, "blue", steps=1e8, submitted_s=5.0)
    quotas = {"red": Quota(guarantee=8), "blue": Quota(guarantee=8)}
    packed = type(known)(tuple(o for o in curve((4,), power=1.0).options if o.shape == (4,)))
    result = decide(snapshot("2x8:cpu", *red, replace(owner, curve=packed), quotas=quotas))
    assert held(after(result))["blue"] == 4
    assert 10 <= held(after(result))["red"] < 12
    assert all(len(view.devices) >= 4 for view in after(result).jobs)


def test_nobody_falls_below_his_own_guarantee_for_another():
    """All devices are covered: an owner that asks for more than is left of the cluster waits."""
    red = [on(gang(f"r{i}", 4, "red"), *span(0, 4 * i, 4 * i + 4)) for i in range(2)]
    quotas = {"red": Quota(guarantee=8), "blue": Quota(guarantee=4)}
    state = snapshot("1x8:cpu", *red, gang("owner", 4, "blue", submitted_s=5.0), quotas=quotas)
    assert held(after(decide(state, "fifo"))) == {"red": 8, "blue": 0}


def test_a_policy_cannot_take_what_is_guaranteed():
    """Many short jobs of red against blue's long one: the policy would stop it; it stays, on its devices."""
    long = on(gang("long", 4, "blue", steps=1e7), *span(0, 0, 4))
    short = [gang(f"r{i}", 4, "red", steps=30.0, submitted_s=float(i + 1)) for i in range(6)]
    bare = snapshot("1x8:cpu", long, *short, move_cost=Flat(1.0))
    assert held(after(decide(bare)))["blue"] == 0, "without quotas it is stopped, else this test shows nothing"
    result = decide(replace(bare, quotas={"blue": Quota(guarantee=4), "red": Quota(guarantee=4)}))
    assert held(after(result)) == {"red": 4, "blue": 4}
    assert "long" not in [step.decision.job_id for step in result.steps]


def test_elastic_jobs_of_an_owner_grow_to_what_was_asked_for():
    """Blue asked for 6 and runs on 2 while red borrows."""
    blue = on(job("b", 1e6, ONE_TO_8, tenant="blue", max_devices=8, requested_devices=6), *span(0, 0, 2))
    red = [on(gang(f"r{i}", 2, "red", steps=1e3), *span(0, 2 + 2 * i, 4 + 2 * i)) for i in range(3)]
    quotas = {"red": Quota(guarantee=2), "blue": Quota(guarantee=6)}
    result = decide(snapshot("1x8:cpu", blue, *red, quotas=quotas), "fifo")
    assert held(after(result)) == {"red": 2, "blue": 6}


def test_who_does_not_say_what_it_asks_for_asks_for_all_that_it_can_use():
    """Blue's job may run on 1 to 5 devices and its tenant is sure of 6: it gets 5, as if it had asked for them."""
    red = [on(gang(f"r{i}", 2, "red", steps=1e3), *span(0, 2 + 2 * i, 4 + 2 * i)) for i in range(3)]
    quotas = {"red": Quota(guarantee=2), "blue": Quota(guarantee=6)}
    for asked in (0, 5):
        blue = job("b", 1e6, ONE_TO_8, tenant="blue", max_devices=5, requested_devices=asked)
        state = snapshot("1x8:cpu", on(blue, *span(0, 0, 2)), *red, quotas=quotas)
        assert held(after(decide(state, "fifo")))["blue"] == 5


def test_growth_that_does_not_repay_its_pause_is_not_owed():
    blue = on(job("b", 3.0, ONE_TO_8, tenant="blue", max_devices=8, requested_devices=6), *span(0, 0, 2))
    red = [on(gang(f"r{i}", 2, "red"), *span(0, 2 + 2 * i, 4 + 2 * i)) for i in range(3)]
    quotas = {"red": Quota(guarantee=2), "blue": Quota(guarantee=6)}
    assert not decide(snapshot("1x8:cpu", blue, *red, quotas=quotas), "fifo").steps


def test_moves_in_flight_are_waited_for():
    moving = replace(on(gang("r0", 8, "red"), *span(0, 0, 8)), moving_until_s=500.0)
    quotas = {"blue": Quota(guarantee=8)}
    state = snapshot("1x8:cpu", moving, gang("owner", 8, "blue", submitted_s=1.0), quotas=quotas)
    result = decide(state)
    assert not result.steps
    assert "guaranteed" in result.waits["owner"].sentence
    assert held(after(decide(replace(state, now_s=600.0)))) == {"red": 0, "blue": 8}


def test_priorities_order_a_tenants_own_claims_only():
    """Red's job of highest priority borrows; blue's of lowest is covered: a guarantee is no matter of priority."""
    red = on(gang("red", 8, "red", priority=9), *span(0, 0, 8))
    low, high = gang("low", 4, "blue", submitted_s=1.0), gang("high", 4, "blue", priority=1, submitted_s=2.0)
    state = snapshot("1x8:cpu", red, low, high, quotas={"blue": Quota(guarantee=4)})
    done = {view.id: len(view.devices) for view in after(decide(state)).jobs}
    assert done == {"red": 0, "low": 0, "high": 4} or done == {"red": 0, "low": 4, "high": 4}


def test_a_job_that_may_not_be_stopped_is_not_stopped_for_an_owner():
    """It may be moved or shrunk: the other borrower stops."""
    word = replace(on(gang("word", 4, "red"), *span(0, 0, 4)), stoppable=False)
    other = on(gang("other", 4, "red", steps=1.0), *span(0, 4, 8))
    state = snapshot("1x8:cpu", word, other, gang("owner", 4, "blue", submitted_s=9.0), quotas={"blue": Quota(8)})
    done = {view.id: len(view.devices) for view in after(decide(state)).jobs}
    assert done == {"word": 4, "other": 0, "owner": 4}
    alone = replace(state, jobs=tuple(view for view in state.jobs if view.id != "other"), down=frozenset(other.devices))
    assert not run_cycle(alone, load("suika")).steps
    lowered = snapshot("1x8:cpu", word, quotas={"red": Quota(max=2)})
    assert not run_cycle(lowered, load("suika")).steps


# -- maxima -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_maximum_leaves_the_rest_to_others(policy: str):
    """Red's six short jobs come first under most policies; it may hold 4, and nothing stays idle for it."""
    red = [gang(f"r{i}", 4, "red", steps=10.0, submitted_s=float(i)) for i in range(6)]
    blue = gang("b", 4, "blue", steps=1e6, submitted_s=10.0)
    result = decide(snapshot("1x8:cpu", *red, blue, quotas={"red": Quota(max=4)}), policy)
    assert held(after(result)) == {"red": 4, "blue": 4}
    assert {str(reason.code) for reason in result.waits.values()} == {"quota"}


def test_an_elastic_job_grows_only_to_the_maximum():
    state = snapshot("2x8:cpu", job("a", 1e6, curve(power=1.0), tenant="red"), quotas={"red": Quota(max=8)})
    assert held(after(decide(state))) == {"red": 8}


def test_a_lowered_maximum_is_enforced_by_shrinking():
    view = on(job("a", 1e6, ONE_TO_8, max_devices=8, tenant="red"), *span(0, 0, 8))
    result = decide(snapshot("1x8:cpu", view, quotas={"red": Quota(max=3)}))
    assert held(after(result)) == {"red": 3}
    assert str(result.steps[0].decision.reason.code) == "quota"


# -- whole nodes ------------------------------------------------------------------------------------------------------


def scattered(num_nodes: int, each: int, tenant: str) -> list[JobView]:
    return [on(gang(f"{tenant}{n}", each, tenant), *span(n, 0, each)) for n in range(num_nodes)]


def test_two_whole_nodes_are_not_sixteen_scattered_devices():
    """48 of 64 devices are free, six on every node: blue is sure of two whole nodes, so two are emptied for it."""
    both = curve((16,))  # two whole nodes, or 4 on each of four, 10 % slower
    owner = job("owner", 1e5, both, min_devices=16, max_devices=16, tenant="blue", submitted_s=5.0)
    red = scattered(8, 2, "red")
    plain = after(decide(snapshot("8x8:cpu", *red, owner, quotas={"blue": Quota(guarantee=16)}), "fifo"))
    nodes = {device.node for device in next(v for v in plain.jobs if v.id == "owner").devices}
    assert len(nodes) == 4, "sixteen devices somewhere are sixteen devices"
    result = decide(snapshot("8x8:cpu", *red, owner, quotas={"blue": Quota(guarantee_nodes=2)}), "fifo")
    done = after(result)
    nodes = {device.node for device in next(v for v in done.jobs if v.id == "owner").devices}
    assert len(nodes) == 2
    assert held(done) == {"red": 16, "blue": 16}, "red's jobs make room by moving, none of them stops"


def test_covered_jobs_of_others_make_room_for_whole_nodes_by_moving():
    """Red is sure of its 16 devices, wherever they are."""
    owner = job("owner", 1e5, curve((16,)), min_devices=16, max_devices=16, tenant="blue", submitted_s=5.0)
    quotas = {"blue": Quota(guarantee_nodes=2), "red": Quota(guarantee=16)}
    done = after(decide(snapshot("8x8:cpu", *scattered(8, 2, "red"), owner, quotas=quotas), "fifo"))
    assert held(done) == {"red": 16, "blue": 16}
    assert len({device.node for device in next(v for v in done.jobs if v.id == "owner").devices}) == 2


def test_a_gang_that_stands_scattered_comes_together_if_that_repays():
    spread = [f"n{n}/{i}" for n in range(4) for i in range(4)]
    slow = on(job("owner", 1e6, curve((16,)), min_devices=16, max_devices=16, tenant="blue"), *spread)
    slow = replace(slow, observed_step_s=slow.curve.options[1].step_s)
    red = [on(gang(f"red{n}", 4, "red"), *span(n, 4, 8)) for n in range(4)]
    quotas = {"blue": Quota(guarantee_nodes=2)}
    done = after(decide(snapshot("4x8:cpu", slow, *red, quotas=quotas), "fifo"))
    assert len({device.node for device in next(v for v in done.jobs if v.id == "owner").devices}) == 2
    brief = replace(slow, remaining_steps=1.0)
    assert not decide(snapshot("4x8:cpu", brief, *red, quotas=quotas), "fifo").steps


# -- properties -------------------------------------------------------------------------------------------------------


def unmet(state: Snapshot) -> list[str]:
    """Waiting jobs of one device or more that their tenant's guarantee covers, while unmoving others borrow enough.

    Read independently of the code: jobs here take any number of devices of one node from 1 on, so one device anywhere
    is a start.
    """
    has = held(state)
    found = []
    for view in state.jobs:
        quota = state.quotas.get(view.tenant, Quota())
        if view.devices or view.locked_at(state.now_s) or has[view.tenant] + 1 > quota.guarantee:
            continue
        lent = sum(
            max(has[tenant] - state.quotas.get(tenant, Quota()).guarantee, 0) for tenant in has if tenant != view.tenant
        )
        if lent > 0 or state.free:
            found.append(view.id)
    return found


class Tenants(RuleBasedStateMachine):
    """Jobs of three tenants come, go, and run under a policy; quotas change now and then."""

    policy = "suika"

    def __init__(self) -> None:
        super().__init__()
        quotas = {"red": Quota(guarantee=8, max=16), "blue": Quota(guarantee=8)}
        self.state = snapshot("3x8:cpu", quotas=quotas, move_cost=Flat(5.0))
        self.made = 0

    @rule(tenant=st.sampled_from(["red", "blue", "grey"]), steps=st.floats(10, 1e6), asks=st.integers(1, 8))
    def arrive(self, tenant: str, steps: float, asks: int) -> None:
        self.made += 1
        view = job(
            f"j{self.made:03}", steps, ONE_TO_8, tenant=tenant, max_devices=8, requested_devices=asks,
            submitted_s=self.state.now_s,
        )  # fmt: skip
        self.step((*self.state.jobs, view))

    @rule(which=st.integers(0, 50))
    def end(self, which: int) -> None:
        running = [view for view in self.state.jobs if view.devices]
        if running:
            gone = running[which % len(running)]
            self.step(tuple(view for view in self.state.jobs if view is not gone))

    @rule(most=st.integers(8, 20))
    def limit(self, most: int) -> None:
        self.state = replace(self.state, quotas={**self.state.quotas, "red": Quota(guarantee=8, max=most)})
        self.step(self.state.jobs)

    def step(self, jobs: tuple[JobView, ...]) -> None:
        self.state = replace(self.state, jobs=jobs, now_s=self.state.now_s + 7.0)
        result = run_cycle(self.state, load(self.policy))
        assert not result.rejected
        cold = replace(self.state, cluster=replace(self.state.cluster), jobs=tuple(replace(v) for v in jobs))
        assert run_cycle(cold, load(self.policy)).steps == result.steps, "an incremental decision is the cold one"
        self.state = after(result)
        for _ in range(4):  # as drivers do
            if not result.unfinished:
                break
            result = run_cycle(self.state, load(self.policy))
            self.state = after(result)

    @invariant()
    def legal(self) -> None:
        check_floor(self.state)

    @invariant()
    def no_maximum_is_exceeded(self) -> None:
        assert held(self.state).get("red", 0) <= (self.state.quotas["red"].max or 0)

    @invariant()
    def guarantees_are_honoured(self) -> None:
        assert not unmet(self.state)


class TenantsUnderFifo(Tenants):
    policy = "fifo"


class TenantsUnderSrtf(Tenants):
    policy = "srtf"


for machine in (Tenants, TenantsUnderFifo, TenantsUnderSrtf):
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20, deadline=None)
TestTenants, TestTenantsUnderFifo, TestTenantsUnderSrtf = (
    machine.TestCase for machine in (Tenants, TenantsUnderFifo, TenantsUnderSrtf)
)


@settings(max_examples=60, deadline=None)
@example(
    26, 8, 0
)  # a guaranteed gang on a draining node that fits nowhere else is no reason to leave others above a maximum
@given(st.integers(0, 10**6), st.integers(0, 16), st.integers(0, 12))
def test_any_quotas_leave_a_legal_floor(seed: int, red: int, blue: int):
    """Random clusters with draining nodes, down devices, gangs of all sizes: legal, repeatable, within the maxima."""
    quotas = {"red": Quota(guarantee=red, max=red + 4), "blue": Quota(guarantee_nodes=blue // 8, max=20)}
    state = replace(random_snapshot(seed), quotas=quotas)
    for name in ("suika", "sia"):
        result = run_cycle(state, load(name))
        done = after(result)
        check_floor(done)
        assert all(held(done).get(tenant, 0) <= (quota.max or 0) for tenant, quota in quotas.items())
        assert run_cycle(replace(state), load(name)).steps == result.steps


# -- files ------------------------------------------------------------------------------------------------------------


def test_quotas_from_a_file():
    found = parse_quotas({"a": 4, "b": {"guarantee": 8, "max": 16}, "c": {"guarantee_nodes": 2}})
    assert found == {"a": Quota(max=4), "b": Quota(8, max=16), "c": Quota(guarantee_nodes=2)}
    for wrong in ([1], {"a": "x"}, {"a": -1}, {"a": {"min": 3}}, {"a": {"guarantee": 5, "max": 4}}, {"a": True}):
        with pytest.raises(SpecError):
            parse_quotas(wrong)
    cluster = parse_cluster_shorthand("2x8:cpu")
    check_quotas({"a": Quota(guarantee=8), "b": Quota(guarantee_nodes=1)}, cluster)
    for wrong_sum in ({"a": Quota(guarantee=17)}, {"a": Quota(guarantee=9), "b": Quota(guarantee_nodes=1)}):
        with pytest.raises(SpecError, match="guaranteed"):
            check_quotas(wrong_sum, cluster)
