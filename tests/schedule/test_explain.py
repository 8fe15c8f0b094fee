"""What would change a job's lot: tried out on the policy, so it must come true when it is done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import POLICIES, curve, job, on, random_snapshot, snapshot

from suika.core.errors import NotFoundError
from suika.core.layout import Layout
from suika.core.quota import Quota
from suika.schedule.cycle import run_cycle
from suika.schedule.explain import explain
from suika.schedule.policies import load


def told(state, job_id: str, policy: str = "suika") -> dict[str, str]:
    return {row["change"]: row["then"] for row in explain(state, load(policy), job_id)["would_change"]}


def gang(num: int):
    return curve((num,), power=1.0)


def test_a_waiting_job_is_told_what_would_start_it():
    big = on(job("big", 1e4, gang(8), min_devices=8, max_devices=8), *(f"n0/{i}" for i in range(8)))
    small = job("small", 1e6, curve((2, 4)), min_devices=4, max_devices=4, submitted_s=5.0)
    state = snapshot("1x8:cpu", big, small)
    assert not run_cycle(state, load("suika")).steps
    found = told(state, "small")
    assert found["priority 1 instead of 0"] == "it starts on 4 devices as tp1 pp1 dp4"
    assert found["one more node"] == "it starts on 4 devices as tp1 pp1 dp4"
    assert any(change.startswith("the next end of a job, on 8 devices in") for change in found)
    waits = explain(state, load("suika"), "small")["waits_for"]
    assert (waits["devices"], waits["free_now"]) == (4, 0)
    assert waits["in_s"] == pytest.approx(1e4 * big.step_s)


def test_sizes_layouts_and_quotas_are_tried():
    busy = on(job("busy", 1e4, gang(6), min_devices=6, max_devices=6), *(f"n0/{i}" for i in range(6)))
    wants = job("wants", 1e6, curve((2, 4)), min_devices=4, max_devices=4, submitted_s=5.0)
    assert told(snapshot("1x8:cpu", busy, wants), "wants")["a range from 2 instead of 4 devices on"].startswith(
        "it starts on 2"
    )
    fixed = replace(wants, fixed_layout=Layout(tp=4), min_devices=2)
    assert told(snapshot("1x8:cpu", fixed), "wants")["any layout instead of tp4 pp1 dp1"]
    limited = replace(wants, tenant="red")
    state = snapshot("1x8:cpu", limited, quotas={"red": Quota(max=3)})
    assert told(state, "wants") == {
        "no maximum for tenant red instead of 3 devices": "it starts on 4 devices as tp1 pp1 dp4",
        "a range from 2 instead of 4 devices on": "it starts on 2 devices as tp1 pp1 dp2",
    }
    lent = snapshot("1x8:cpu", replace(busy, tenant="blue"), limited, quotas={"blue": Quota(max=8)})
    assert "a guarantee of 4 devices for tenant red" in told(lent, "wants")


def test_a_job_in_a_move_must_end_it_first():
    moving = replace(on(job("a"), "n0/0"), moving_until_s=130.0)
    assert told(snapshot("1x8:cpu", moving), "a") == {"the end of its move": "it can be decided about again in 30.0s"}
    with pytest.raises(NotFoundError):
        explain(snapshot("1x8:cpu", moving), load("suika"), "b")


def test_options_say_when_the_job_would_end():
    running = on(job("a", 100.0, curve((1, 2, 4))), "n0/0")
    rows = explain(snapshot("1x8:cpu", running), load("fifo"), "a")["options"]
    assert [row["devices"] for row in rows] == [1, 2, 4]
    assert [row["has"] for row in rows] == [True, False, False]
    assert rows[0]["ends_in_s"] == pytest.approx(100.0)
    assert rows[1]["ends_in_s"] == pytest.approx(100.0 / 2**0.8 + 10.0)  # its move included


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(POLICIES))
def test_any_job_can_be_explained_and_explaining_changes_nothing(seed: int, policy: str):
    state = replace(random_snapshot(seed, num_jobs=6), quotas={"red": Quota(guarantee=4, max=12)})
    before = run_cycle(state, load(policy)).steps
    for view in state.jobs:
        found = explain(state, load(policy), view.id)
        changes = [row["change"] for row in found["would_change"]] + found["without_effect"]
        assert len(changes) == len(set(changes))
    assert run_cycle(state, load(policy)).steps == before
