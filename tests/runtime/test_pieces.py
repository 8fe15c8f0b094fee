"""Who saves what, against its definition: rank by rank, region by region, without what makes it fast."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from suika.core.cluster import Cluster, Device, Node
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.core.tensors import logical_tensors
from suika.reshard.regions import Box, refine
from suika.reshard.state import ITEM_BYTES, JobShape, Region, StateKey
from suika.runtime import pieces
from suika.runtime.pieces import Piece

sys.path.insert(0, str(Path(__file__).parents[1] / "reshard"))
from layouts import plans, shapes

CLUSTER = Cluster(tuple(Node(name, 4, "cpu") for name in "abcd"))
RELAXED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
LINE = 64
Owner = tuple[int, Region]


def parts(shape: JobShape, plan: Plan) -> Iterator[tuple[Box, list[Owner]]]:
    holders: dict[StateKey, dict[Box, list[Owner]]] = {}
    for rank in range(plan.layout.num_ranks):
        for region in pieces.plan_regions(shape, plan, rank):
            holders.setdefault(region.key, {}).setdefault(region.box, []).append((rank, region))
    numel = {tensor.name: tensor.numel for tensor in logical_tensors(shape.model, shape.sequence_length)}
    for key, boxes in holders.items():
        whole = numel[key.tensor]
        cells = list(boxes) if sum(box.numel for box in boxes) == whole else refine(boxes)
        assert sum(cell.numel for cell in cells) == whole
        for cell in cells:
            yield cell, [owner for box, owners in boxes.items() if box.contains(cell) for owner in owners]


def least_loaded(owners: Iterable[Owner], load: list[int]) -> Owner:
    return min(owners, key=lambda owner: (load[owner[0]], owner[0]))


def defined_pieces(shape: JobShape, plan: Plan) -> list[tuple[Piece, ...]]:
    found: list[list[Piece]] = [[] for _ in plan.devices]
    load = [0 for _ in plan.devices]
    for part, owners in parts(shape, plan):
        rank, region = least_loaded(owners, load)
        load[rank] += part.numel
        found[rank].append(Piece(part, region))
    return list(map(tuple, found))


def defined_shares(shape: JobShape, plan: Plan) -> list[tuple[tuple[Piece, ...], tuple[Piece, ...]]]:
    """By rank: the pieces that lie on no other node, and the others."""
    alone: list[list[Piece]] = [[] for _ in plan.devices]
    shared: list[list[Piece]] = [[] for _ in plan.devices]
    load = [0 for _ in plan.devices]
    for part, owners in parts(shape, plan):
        first, region = least_loaded(owners, load)
        load[first] += part.numel
        elsewhere = [owner for owner in owners if plan.devices[owner[0]].node != plan.devices[first].node]
        (shared if elsewhere else alone)[first].append(Piece(part, region))
        if elsewhere:
            second, region = least_loaded(elsewhere, load)
            load[second] += part.numel
            shared[second].append(Piece(part, region))
    return [(tuple(mine), tuple(ours)) for mine, ours in zip(alone, shared, strict=True)]


@settings(max_examples=150, **RELAXED)
@given(st.data())
def test_each_rank_saves_what_the_definition_says(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    plan = data.draw(plans(shape, CLUSTER))
    assert list(pieces.pieces(shape, plan)) == defined_pieces(shape, plan)
    expected = defined_shares(shape, plan)
    found = pieces.shares(shape, plan)
    assert [(share.pieces[: share.num_alone], share.pieces[share.num_alone :]) for share in found] == expected

    width = {kind: ITEM_BYTES[dtype] for kind, dtype in pieces.dtypes(shape).items()}
    own, alone = ({device.node: 0 for device in plan.devices} for _ in range(2))
    for device, (mine, ours) in zip(plan.devices, expected, strict=True):
        sizes = [piece.box.numel * width[piece.region.key.kind] for piece in (*mine, *ours)]
        lines = [-(-num_bytes // LINE) * LINE for num_bytes in sizes]
        own[device.node] += max(sum(lines), LINE)
        alone[device.node] += sum(lines[: len(mine)])
    assert pieces.own_bytes(shape, plan) == {node: (own[node], alone[node]) for node in own}


@settings(max_examples=100, **RELAXED)
@given(st.data())
def test_it_is_whole_when_no_piece_is_missing(data: st.DataObject) -> None:
    """Few ranks are left out, or none has anything: both answers come often."""
    shape = data.draw(shapes())
    plan = data.draw(plans(shape, CLUSTER))
    ranks = range(plan.layout.num_ranks)
    gone, lost = (data.draw(st.sets(st.sampled_from(ranks), max_size=2)) for _ in range(2))
    own, copied = set(ranks) - gone, data.draw(st.sampled_from((set(), set(ranks) - lost)))
    everyone = defined_shares(shape, plan)
    there = {piece.place for rank in own for of in everyone[rank] for piece in of}
    there |= {piece.place for rank in copied for piece in everyone[rank][0]}
    expected = all(piece.place in there for share in everyone for of in share for piece in of)
    assert pieces.is_whole(shape, plan, own, copied) == expected


def test_a_large_job_is_no_work() -> None:
    """Layers and stages that are alike are cut once; region by region it takes seconds."""
    model = ModelSpec("70b", "llama", 80, 8192, 28672, 64, 32000, kv_heads=8)
    shape, layout = JobShape(model, 4096, "bf16"), Layout(tp=8, pp=8, dp=8).resolve(model)
    plan = Plan(layout, Placement(tuple(Device(f"n{rank // 8}", rank % 8) for rank in range(512))))
    began_s = time.process_time()
    found = pieces.own_bytes(shape, plan)
    assert time.process_time() - began_s < 1.0
    weights = sum(tensor.numel for tensor in logical_tensors(model, 4096))
    twice = sum(own + alone for own, alone in found.values())
    assert 0 <= twice / (2 * 14 * weights) - 1 < 0.001, "bf16 weights, fp32 masters and two moments, on two nodes each"
