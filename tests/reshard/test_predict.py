"""Predictions: of the same move whatever its devices are called, of stopped jobs, and quick enough to ask often."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from suika.core.cluster import Cluster, Device, Node, parse_cluster_shorthand
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.core.snapshot import JobView, ScalingCurve
from suika.reshard import predict as module
from suika.reshard.alike import is_uniform, renumbered
from suika.reshard.assignment import assign
from suika.reshard.cells import groups_of
from suika.reshard.predict import GPU, MovePredictor, pace_of, predict, state_bytes
from suika.reshard.state import JobShape

LLAMA_7B = JobShape(ModelSpec("llama-7b", "llama", 32, 4096, 11008, 32, 32000), 4096, "bf16")
CLUSTER = parse_cluster_shorthand("8x8:H100")


def view(layout: Layout | None, devices: tuple[Device, ...], **other: object) -> JobView:
    state = JobState.RUNNING if devices else JobState.QUEUED
    job = JobView("j", state, 0.0, 100.0, 10.0, ScalingCurve(()), 1, 64, layout=layout, devices=devices)
    return replace(job, **other)  # type: ignore[arg-type]


def test_cached_answers_are_quick_and_cold_ones_quick_enough_for_a_decision() -> None:
    """Measured: 0.03 ms and 6 ms at 64 ranks (docs/numbers/reshard.md); the bounds here allow for a busy machine."""
    old = Plan(Layout(tp=8, pp=4, dp=2).resolve(LLAMA_7B.model), Placement(CLUSTER.devices))
    new = Plan(Layout(tp=4, pp=4, dp=4).resolve(LLAMA_7B.model), Placement(CLUSTER.devices))
    predict(LLAMA_7B, old, new, CLUSTER)
    module.predict_move.cache_clear()
    groups_of.cache_clear()
    start = time.process_time()
    first = predict(LLAMA_7B, old, new, CLUSTER)
    cold_s = time.process_time() - start
    start = time.process_time()
    assert all(predict(LLAMA_7B, old, new, CLUSTER) == first for _ in range(100))
    cached_s = (time.process_time() - start) / 100
    assert cold_s < 0.060
    assert cached_s < 0.0006


def test_the_same_arrangement_costs_the_same_under_other_names() -> None:
    """Devices and nodes shuffled: same prediction, and it is found in the cache."""
    rng = random.Random(1)
    predictor = MovePredictor({"j": LLAMA_7B}, CLUSTER, GPU)
    layout, bigger = Layout(tp=4, dp=2), Layout(tp=4, dp=4)
    answers = set()
    module._placed_move.cache_clear()
    for _ in range(10):
        nodes = rng.sample([node.name for node in CLUSTER.nodes], 2)
        indices = rng.sample(range(8), 8)
        first, second = ([Device(node, i) for i in indices] for node in nodes)
        answers.add(predictor(view(layout, tuple(first)), bigger, (*rng.sample(second, 8), *first)))
    assert len(answers) == 1
    assert module._placed_move.cache_info().misses == 1


def test_renumbering_keeps_what_matters() -> None:
    cluster = Cluster(tuple(Node(name, 4, "x", domain_size=2) for name in "abc"))
    old, new = (Device("c", 3), Device("c", 2), Device("a", 0)), (Device("a", 1), Device("c", 3))
    smallest, before, after = renumbered(cluster, old, new)
    assert is_uniform(cluster)
    assert (before, after) == ((Device("0", 0), Device("0", 1), Device("1", 0)), (Device("0", 0), Device("1", 1)))
    assert smallest.level(before[0], before[1]) == cluster.level(old[0], old[1]) == "domain"
    assert smallest.level(before[0], before[2]) == cluster.level(old[0], old[2]) == "rack"
    assert not is_uniform(Cluster((Node("a", 4, "x"), Node("b", 8, "x"))))


def test_ranks_are_placed_as_executors_place_them() -> None:
    """The order of devices in a decision costs nothing: the prediction is that of the assigned order."""
    predictor = MovePredictor({"j": LLAMA_7B}, CLUSTER, GPU)
    devices = CLUSTER.devices[:16]
    layout = Layout(tp=4, dp=4).resolve(LLAMA_7B.model)
    old = Plan(layout, Placement(devices))
    halved = Layout(tp=4, dp=2).resolve(LLAMA_7B.model)
    kept = devices[8:]
    placed = Plan(halved, Placement(assign(LLAMA_7B, old, halved, kept, CLUSTER)))
    said = predictor(view(layout, devices), halved, kept[::-1])
    assert said == predict(LLAMA_7B, old, placed, CLUSTER, GPU)
    assert predictor(view(layout, devices), layout, devices[::-1]).moved_bytes == 0


def test_giving_up_everything_is_priced_too() -> None:
    """Its devices are free when its state is in storage."""
    predictor = MovePredictor.of({"j": LLAMA_7B}, CLUSTER)
    move = predictor(view(Layout(tp=4), CLUSTER.devices[:4]), None, ())
    assert move.pause_s == move.release_s == state_bytes(LLAMA_7B) / 4 / GPU.snapshot_bytes_per_s


def test_devices_are_put_in_the_order_that_moves_least_and_groups_stay_whole() -> None:
    """Random moves: never more bytes than in the order given, and each tensor-parallel group inside one node."""
    predictor, rng = MovePredictor.of({"j": LLAMA_7B}, CLUSTER), random.Random(3)
    for _ in range(12):
        old, new = (rng.choice([Layout(tp=4, pp=2), Layout(tp=8, dp=2), Layout(tp=2, pp=2, dp=4)]) for _ in "ab")
        nodes = rng.sample(range(8), 4)
        held = tuple(d for n in nodes[:2] for d in CLUSTER.nodes[n].devices)[: old.num_ranks]
        gets = tuple(d for n in nodes[1:3] for d in CLUSTER.nodes[n].devices)[: new.num_ranks]
        job = view(old, held)
        placed = predictor.place(job, new, gets)
        assert sorted(placed) == sorted(gets)
        before = Plan(old.resolve(LLAMA_7B.model), Placement(held))
        moved = [
            predict(LLAMA_7B, before, Plan(new.resolve(LLAMA_7B.model), Placement(order)), CLUSTER, GPU).moved_bytes
            for order in (placed, gets)
        ]
        assert moved[0] <= moved[1]
        groups = [placed[i : i + new.tp] for i in range(0, len(placed), new.tp)]
        assert all(len({device.node for device in group}) == 1 for group in groups)
    assert predictor.place(view(None, ()), Layout(tp=4), CLUSTER.devices[:4]) == CLUSTER.devices[:4]


def test_stopped_jobs_are_launched_and_read_their_state() -> None:
    predictor = MovePredictor({"j": LLAMA_7B}, CLUSTER, GPU)
    fresh = predictor(view(None, ()), Layout(dp=4), CLUSTER.devices[:4])
    resumed = predictor(view(None, (), has_state=True), Layout(dp=4), CLUSTER.devices[:4])
    assert fresh.pause_s == GPU.launch_s
    assert resumed.pause_s == pytest.approx(GPU.launch_s + state_bytes(LLAMA_7B) / 4 / GPU.snapshot_bytes_per_s)
    assert state_bytes(LLAMA_7B) == 14 * 6_738_415_616  # 2 + 12 bytes per parameter
    stored = view(None, (), has_state=True)
    assert predictor.typical(replace(stored, min_devices=8)) < predictor.typical(stored)
    assert predictor.typical(view(None, ())) == GPU.launch_s
    assert pace_of(CLUSTER) is GPU
