"""B72 on whole decisions: whatever the inventory looks like, every policy decides something legal and whole.

Nodes of uneven sizes, listed with racks interleaved; domains smaller than nodes; broken, slow and draining parts;
devices of running jobs in any order of ranks; jobs without options, of sizes that their ranges do not hold any more,
that may not be stopped or touched; many priorities and weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import POLICIES, Flat, after, check_floor, job, on, snapshot

from suika.core.cluster import Cluster, Device, Node
from suika.core.decision import Action
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Option, ScalingCurve, Snapshot
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import load


def inventory(rng: np.random.Generator) -> Cluster:
    kinds = ["H100", "A100"] if rng.random() < 0.3 else ["H100"]
    nodes = []
    for number in rng.permutation(int(rng.integers(1, 7))).tolist():
        size = int(rng.choice([1, 2, 3, 4, 6, 8, 8, 8]))
        domain = int(rng.choice([0, 1, 2, 4]))
        nodes.append(Node(f"n{number}", size, str(rng.choice(kinds)), domain, rack=f"r{number % 3}"))
    return Cluster(tuple(nodes), name="odd")


def options(rng: np.random.Generator, cluster: Cluster) -> ScalingCurve:
    """Shapes with tensor-parallel parts that divide what lies on each node; few, many, or none that fit."""
    kinds = sorted({node.device_type for node in cluster.nodes}) if rng.random() < 0.5 else [""]
    found = {}
    for _ in range(int(rng.integers(0, 9))):
        part = int(rng.choice([1, 2, 3, 4, 8]))
        shape = (part,) * int(rng.choice([1, 1, 1, 2, 3]))
        tp = int(rng.choice([num for num in (1, 2, 4, 8) if part % num == 0]))
        kind = str(rng.choice(kinds))
        step_s = float(rng.uniform(0.5, 2.0)) / sum(shape) ** 0.7
        found[shape, kind] = Option(shape, Layout(tp=tp, dp=sum(shape) // tp), step_s, kind)
    return ScalingCurve(tuple(sorted(found.values(), key=lambda o: (o.device_type, o.num_devices, len(o.shape)))))


def stand(rng: np.random.Generator, cluster: Cluster, view: JobView, taken: set[Device]) -> JobView:
    """The job on free devices in one of its shapes, ranks in any order; as it is if there are none."""
    for number in rng.permutation(len(view.curve.options)).tolist():
        option = view.curve.options[number]
        devices: list[Device] = []
        for part in option.shape:
            for node in cluster.nodes:
                here = [d for d in node.devices if d not in taken and node.name not in {x.node for x in devices}]
                if len(here) >= part and option.device_type in ("", node.device_type):
                    devices += here[:part]
                    break
        same_type = len({cluster.node_of[device.node].device_type for device in devices}) == 1
        if len(devices) == option.num_devices and same_type:
            taken.update(devices)
            order = [devices[i] for i in rng.permutation(len(devices))]
            return on(view, *map(str, order), layout=option.layout)
    return view


def odd_snapshot(seed: int) -> Snapshot:
    rng = np.random.default_rng(seed)
    cluster = inventory(rng)
    taken: set[Device] = set()
    jobs = []
    for number in range(int(rng.integers(0, 9))):
        low = int(rng.choice([1, 1, 2, 3, 8]))
        view = job(
            f"j{number}",
            float(10 ** rng.uniform(-3, 9)),
            options(rng, cluster),
            min_devices=low,
            max_devices=low + int(rng.choice([0, 3, 20])),
            requested_devices=int(rng.choice([0, low])),
            submitted_s=float(rng.choice([0.0, 5.0, 99.0])),
            priority=int(rng.integers(-1000, 1000)) if rng.random() < 0.3 else 0,
            weight=float(10 ** rng.uniform(-12, 12)) if rng.random() < 0.2 else 1.0,
        )
        if rng.random() < 0.6:
            view = stand(rng, cluster, view, taken)
        if view.running:
            view = replace(
                view,
                min_devices=1 if rng.random() < 0.8 else view.min_devices,
                stoppable=bool(rng.random() < 0.8),
                pinned=bool(rng.random() < 0.05),
                moving_until_s=150.0 if rng.random() < 0.15 else None,
                interruptible=bool(rng.random() < 0.5),
                num_moves=int(rng.integers(0, 12)),
                observed_step_s=float(rng.uniform(0.1, 3.0)) if rng.random() < 0.5 else None,
            )
        jobs.append(view)
    changes: dict[str, Any] = {}
    idle = [device for device in cluster.devices if device not in taken]
    if rng.random() < 0.5:
        some = cluster.devices if rng.random() < 0.3 else tuple(idle)
        changes["down"] = frozenset(device for device in some if rng.random() < 0.3)
    if rng.random() < 0.2:
        changes["draining"] = frozenset({cluster.nodes[0].name})
    if rng.random() < 0.3:
        changes["slow"] = {device: 2.0 for device in cluster.devices if rng.random() < 0.2}
    if rng.random() < 0.2:
        changes["promised"] = {device: 120.0 for device in idle[:3] if device not in changes.get("down", ())}
    return snapshot(cluster, *jobs, **{"move_cost": Flat(float(rng.choice([0.0, 10.0, 300.0]))), **changes})


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_b72_any_inventory_leads_to_legal_and_whole_gangs(name: str, seed: int):
    state = odd_snapshot(seed)
    result = run_cycle(state, load(name))
    assert run_cycle(replace(state), load(name)).steps == result.steps
    told = {job_id for job_id, _ in result.waits.items()}
    untouched = {view.id: view for view in state.jobs}
    for step in result.steps:
        decision, view = step.decision, untouched.pop(step.decision.job_id)
        assert not view.locked_at(state.now_s)
        assert decision.devices or view.stoppable
        assert not set(decision.devices) & set(state.down)
        assert not {device.node for device in decision.devices} & state.draining
        kinds = {state.cluster.node_of[device.node].device_type for device in decision.devices}
        assert len(kinds) <= 1
        if decision.layout is not None:
            assert view.min_devices <= len(decision.devices) <= view.max_devices
            groups_stay_in_a_node(decision.layout, decision.devices)
    done = after(result)
    held = [device for view in done.jobs for device in view.devices]
    assert len(held) == len(set(held))
    assert told >= {view.id for view in done.jobs if not view.devices and view.id in untouched}
    for view in done.jobs:
        assert not view.devices or view.layout is None or view.layout.num_ranks == len(view.devices)


def groups_stay_in_a_node(layout: Layout, devices: tuple[Device, ...]) -> None:
    """Every tensor-parallel group: here each node's share of a shape divides by tp, so that it is always possible."""
    for first in range(0, len(devices), layout.tp):
        assert len({device.node for device in devices[first : first + layout.tp]}) == 1


def test_a_refused_stop_takes_nobody_down_with_it():
    """B66: the new job needs a node whole, of which one job may not be stopped. The other one runs on."""
    whole = ScalingCurve((Option((8,), Layout(dp=8), 0.01, ""),))
    half = ScalingCurve((Option((4,), Layout(dp=4), 1.0, ""),))
    gang = {"min_devices": 4, "max_devices": 4}
    firm = replace(on(job("firm", 1e6, half, **gang), *(f"n0/{i}" for i in range(4))), stoppable=False)
    soft = on(job("soft", 1e6, half, **gang), *(f"n0/{i}" for i in range(4, 8)))
    new = job("new", 100.0, whole, min_devices=8, max_devices=8, requested_devices=8, submitted_s=50.0, priority=5)
    for name in POLICIES:
        result = run_cycle(snapshot("1x8:cpu", firm, soft, new), load(name))
        assert not [step for step in result.steps if step.decision.action is Action.PREEMPT], name
        check_floor(after(result))
