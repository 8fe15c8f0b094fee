"""Moves that read neighbours' memory: the same bits as over a wire, whole buffers without a copy, errors that rise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import labels
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import plans, shapes
from processes import run_forked

from suika.core.cluster import Cluster, Device
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Plan
from suika.reshard import bits
from suika.reshard.execute import ReplicaMismatchError, VerificationError, execute
from suika.reshard.links import Links
from suika.reshard.modes import adoptions
from suika.reshard.moveplan import MovePlan, plan_move
from suika.reshard.nearby import Nearby
from suika.reshard.report import MoveReport
from suika.reshard.state import JobShape
from suika.reshard.transports import memfd
from suika.reshard.transports.base import Lent
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.inprocess import Hub, InProcess
from suika.reshard.transports.mixed import Mixed

CLUSTER = labels.cluster(nodes=3, devices=3)
MODEL = ModelSpec("tiny", family="llama", layers=4, hidden=16, ffn=24, heads=4, kv_heads=2, vocab=37)
SHAPE = JobShape(MODEL, 4, "fp32")


@dataclass(frozen=True)
class SameNode(InProcess):
    """Threads that see only the memory of their own node."""

    node: tuple[int, ...] = ()

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        everyone = super().lend(buffers)
        return {peer: lent for peer, lent in everyone.items() if self.node[peer] == self.node[self.rank]}


def move_nearby(
    move: MovePlan, state: Mapping[Device, labels.Buffers], where: Cluster
) -> dict[Device, tuple[labels.Buffers, MoveReport]]:
    """Like `labels.move_in_threads`, with common memory inside nodes."""
    hub, node = Hub(len(move.participants), timeout_s=20), tuple(Links(where, move.participants).node)
    results: dict[Device, tuple[labels.Buffers, MoveReport]] = {}

    def run(rank: int, device: Device) -> None:
        transport, old = SameNode(hub, rank, node), state.get(device, {})
        near = Nearby.prepare(move, rank, old, transport)
        results[device] = execute(move, device, old, transport, near=near)

    labels.in_threads([partial(run, rank, device) for rank, device in enumerate(move.participants)])
    assert hub.unmatched() == 0
    return results


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_every_element_arrives_where_its_label_says(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    chain = [data.draw(plans(shape, CLUSTER)) for _ in range(3)]
    state = labels.state_of(shape, chain[0])
    for old, new in pairwise(chain):
        move = plan_move(shape, old, new, CLUSTER, chunk_bytes=512)
        results = move_nearby(move, state, CLUSTER)
        state = {device: results[device][0] for device in new.devices}
        labels.check_labels(shape, new, state)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_a_buffer_is_adopted_once_and_only_when_its_owner_lets_go(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    old, new = data.draw(plans(shape, CLUSTER)), data.draw(plans(shape, CLUSTER))
    move = plan_move(shape, old, new, CLUSTER)
    found = adoptions(move, range(len(move.participants)))
    sources = [source for mine in found.values() for source in mine.values()]
    assert len(sources) == len(set(sources))
    for owner, name in sources:
        assert name not in move.kept(owner).values()
    for needer, mine in found.items():
        assert not set(mine) & set(move.kept(needer))


def test_a_pipeline_stage_changes_hands_without_a_copy() -> None:
    """pp 2 -> 1 on another device of the node: every buffer exists already in the wanted shape."""
    a, b, c = CLUSTER.devices[:3]
    old, new = labels.plan(SHAPE, Layout(pp=2), (a, b)), labels.plan(SHAPE, Layout(), (c,))
    state = labels.state_of(SHAPE, old)
    pages = {t.data_ptr() for buffers in state.values() for t in buffers.values()}
    results = move_nearby(plan_move(SHAPE, old, new, CLUSTER), state, CLUSTER)
    buffers, report = results[c]
    labels.check_labels(SHAPE, new, {c: buffers})
    assert {t.data_ptr() for t in buffers.values()} == pages
    assert (report.allocated_bytes, report.hashed_bytes) == (0, 0)
    assert report.received_bytes == report.adopted_bytes == sum(t.numel() * t.element_size() for t in buffers.values())


def test_replicas_that_differ_are_found_though_nothing_is_sent() -> None:
    a, b, c = CLUSTER.devices[:3]
    old, new = labels.plan(SHAPE, Layout(dp=2), (a, b)), labels.plan(SHAPE, Layout(), (c,))
    state = labels.state_of(SHAPE, old)
    name = next(name for name in state[b] if name.startswith("weight/layers.2."))
    state[b][name].view(-1)[3] += 1
    with pytest.raises(ReplicaMismatchError, match=rf"weight of {name[7:]}.* differs between"):
        move_nearby(plan_move(SHAPE, old, new, CLUSTER), state, CLUSTER)


def test_an_element_that_did_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that changes one element on the way fails the move on everybody."""
    a, b = CLUSTER.devices[:2]
    old, new = labels.plan(SHAPE, Layout(), (a,)), labels.plan(SHAPE, Layout(tp=2), (a, b))
    copy, state = bits._memmove, labels.state_of(SHAPE, old)

    def bent(target: int, source: int, num_bytes: int) -> None:
        copy(target, source, num_bytes)
        if num_bytes > 20:
            copy(target + 20, source + 19, 1)

    monkeypatch.setattr(bits, "_memmove", bent)
    with pytest.raises(VerificationError, match="was copied wrongly"):
        move_nearby(plan_move(SHAPE, old, new, CLUSTER), state, CLUSTER)


PATH = (
    (Layout(tp=2, pp=2), "0 1 2 3"),
    (Layout(pp=4), "1 0 2 3"),  # stages split: much is adopted, the rest is cut anew
    (Layout(pp=4), "0 1 3 2"),  # neighbours swap: everything is adopted
    (Layout(dp=4, zero_buckets="stage"), "3 2 1 0"),
    (Layout(tp=2, dp=2), "0 1 2 3"),
    (Layout(), "2"),  # a shrink: three leavers
    (Layout(tp=2, pp=2), "2 3 0 1"),
    (Layout(tp=2, pp=2), "0 1 2 3"),  # all of a node's state to the other node
)


def _plan(shape: JobShape, where: Cluster, layout: Layout, devices: str) -> Plan:
    return labels.plan(shape, layout, tuple(where.devices[int(i)] for i in devices.split()))


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_labelled_moves_between_processes_of_two_nodes(tmp_path: Path, precision: str) -> None:
    """Common memory inside the nodes, gloo between them; descriptors stay flat."""
    shape, where = replace(SHAPE, precision=precision), labels.cluster(nodes=2, devices=2)
    path = [_plan(shape, where, *stop) for stop in PATH]
    assert any(plan_move(shape, old, new, where).forwards for old, new in pairwise(path)), "copies fan out in a node"

    def body(rank: int, gloo: Gloo) -> tuple[int, int, int]:
        device, adopted, near_bytes = where.devices[rank], 0, 0
        buffers = {name: memfd.placed(t) for name, t in labels.labelled_buffers(shape, path[0], rank).items()}
        descriptors = []
        for old, new in [*pairwise(path)] * 2:
            move = plan_move(shape, old, new, where, chunk_bytes=4096)
            assert move.participants == where.devices, "every device has a part in each move of this path"
            transport = Mixed.of(gloo, Links(where, move.participants).node)
            near = Nearby.prepare(move, rank, buffers, transport, memfd.empty)
            buffers, report = execute(move, device, buffers, transport, near=near)
            transport.close()
            del near, transport
            adopted += report.adopted_bytes
            near_bytes += report.received_bytes
            expected = labels.labelled_buffers(shape, new, new.devices.index(device)) if device in new.devices else {}
            assert buffers.keys() == expected.keys()
            assert all(torch.equal(buffers[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items())
            gloo.all_gather(b"")
            descriptors.append(len(os.listdir("/proc/self/fd")) - len(buffers))
        return adopted, near_bytes, descriptors[-1] - descriptors[len(path) - 2]

    results = run_forked(4, tmp_path, body)
    assert sum(adopted for adopted, _, _ in results) > 0
    assert all(grown <= 0 for _, _, grown in results), results
