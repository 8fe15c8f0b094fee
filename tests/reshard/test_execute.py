"""What a move refuses, notices and survives; and the same moves over real processes."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import labels
import pytest
import torch
from processes import run_forked

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.reshard import proof
from suika.reshard.execute import MoveError, VerificationError, execute
from suika.reshard.moveplan import MovePlan, plan_move
from suika.reshard.state import JobShape
from suika.reshard.transports.base import TransportError
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.inprocess import Hub, InProcess

CLUSTER = labels.cluster(nodes=2, devices=2)
MODEL = ModelSpec("llama", "llama", 3, 12, 12, 12, 17, kv_heads=2, head_dim=2, tied=True)
SHAPE = JobShape(MODEL, 4, "bf16")
TP2_PP2 = labels.plan(SHAPE, Layout(tp=2, pp=2), CLUSTER.devices)
DP3 = labels.plan(SHAPE, Layout(dp=3), CLUSTER.devices[1:])


class Tampering(InProcess):
    """A wire that flips one bit of the first message from participant 0."""

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Any:
        if self.rank == 0 and buffer.numel() > 64:
            buffer = buffer.clone()
            buffer[17] ^= 4
        return super().send(peer, tag, buffer)


class TamperedHub(Hub):
    def transports(self) -> list[InProcess]:
        return [Tampering(self, rank) for rank in range(self.size)]


def test_one_flipped_bit_is_noticed_and_the_old_state_is_intact() -> None:
    move, state = plan_move(SHAPE, TP2_PP2, DP3, CLUSTER), labels.state_of(SHAPE, TP2_PP2)
    with pytest.raises(VerificationError, match="arrived changed on rank"):
        labels.move_in_threads(move, state, TamperedHub(4, timeout_s=10))
    labels.check_labels(SHAPE, TP2_PP2, state)


@pytest.mark.parametrize("word", [b'"on_host": false, ', b""], ids=["on a device", "older version"])
@pytest.mark.parametrize("tampered", [False, True])
def test_all_hash_alike_when_one_participant_cannot_hash_as_hosts_do(
    tampered: bool, word: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    move, state = plan_move(SHAPE, TP2_PP2, DP3, CLUSTER), labels.state_of(SHAPE, TP2_PP2)

    def refuse(tensor: torch.Tensor) -> int:
        raise AssertionError("the others cannot have this hash")

    monkeypatch.setattr(proof, "host_hash", refuse)
    if tampered:
        with pytest.raises(VerificationError, match="arrived changed on rank"):
            labels.move_in_threads(move, state, labels.with_device(TamperedHub(4, timeout_s=10), word))
    else:
        moved = labels.move_in_threads(move, state, labels.with_device(Hub(4, timeout_s=10), word))
        labels.check_labels(SHAPE, DP3, {device: moved[device][0] for device in DP3.devices})


def test_different_plans_are_noticed_before_the_first_byte() -> None:
    mine, other = (plan_move(SHAPE, TP2_PP2, DP3, CLUSTER, chunk_bytes=size) for size in (512, 1024))
    assert mine.digest != other.digest
    assert mine.digest == plan_move(SHAPE, TP2_PP2, DP3, CLUSTER, chunk_bytes=512).digest
    hub, state, problems = Hub(4, timeout_s=10), labels.state_of(SHAPE, TP2_PP2), []

    def participant(rank: int, move: MovePlan) -> None:
        device = move.participants[rank]
        with pytest.raises(MoveError, match="different move plans"):
            execute(move, device, state[device], hub.transports()[rank])
        problems.append(rank)

    labels.in_threads([partial(participant, rank, other if rank == 2 else mine) for rank in range(4)])
    assert sorted(problems) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda b: b.pop("weight/final_norm.weight"), r"n1/1: missing buffers \['weight/final_norm.weight'\]"),
        (lambda b: b.update({"m/head": b["m/head"].double()}), "n1/1: buffer m/head is .* float64, the plan says"),
        (lambda b: b.update({"m/head": b["m/head"][:-1]}), "n1/1: buffer m/head is"),
        (lambda b: b.update({"m/head": torch._neg_view(b["m/head"])}), "n1/1: buffer m/head is a negated view"),
    ],
)
def test_buffers_that_are_not_the_plans_are_refused_by_all(spoil: Any, problem: str) -> None:
    state = labels.state_of(SHAPE, TP2_PP2)
    spoil(state[CLUSTER.devices[3]])
    with pytest.raises(MoveError, match=problem):
        labels.move_in_threads(plan_move(SHAPE, TP2_PP2, DP3, CLUSTER), state)


def test_a_cut_link_raises_everywhere_and_changes_nothing() -> None:
    hub, state = Hub(4, timeout_s=10), labels.state_of(SHAPE, TP2_PP2)
    sent = []
    real_post = hub.post

    def post(key: Any, buffer: torch.Tensor, sending: bool) -> Any:
        sent.append(key)
        if len(sent) == 5:
            hub.break_link("cable pulled")
        return real_post(key, buffer, sending)

    hub.post = post  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="cable pulled"):
        labels.move_in_threads(plan_move(SHAPE, TP2_PP2, DP3, CLUSTER, chunk_bytes=512), state, hub)
    labels.check_labels(SHAPE, TP2_PP2, state)


@pytest.mark.parametrize("precision", ["bf16", "fp64"])
def test_labelled_moves_over_gloo_processes(tmp_path: Path, precision: Any) -> None:
    """There and back, over layouts with another tp, pp and dp, on other devices, in four processes."""
    shape = JobShape(MODEL, 4, precision)
    path = [
        labels.plan(shape, layout, devices)
        for layout, devices in (
            (Layout(tp=2, pp=2), CLUSTER.devices),
            (Layout(dp=4, zero_buckets="stage"), CLUSTER.devices[::-1]),
            (Layout(tp=4), CLUSTER.devices),
            (Layout(tp=2, pp=2), (*CLUSTER.devices[2:], *CLUSTER.devices[:2])),
        )
    ]
    moves = [plan_move(shape, old, new, CLUSTER, chunk_bytes=4096) for old, new in pairwise(path)]

    def body(rank: int, transport: Gloo) -> int:
        device, received = CLUSTER.devices[rank], 0
        buffers = labels.labelled_buffers(shape, path[0], path[0].devices.index(device))
        for move, new in zip(moves, path[1:], strict=True):
            buffers, report = execute(move, device, buffers, transport)
            expected = labels.labelled_buffers(shape, new, new.devices.index(device))
            assert all(torch.equal(buffers[n].view(torch.uint8), t.view(torch.uint8)) for n, t in expected.items())
            received += report.received_bytes
        return received

    received = sum(run_forked(4, tmp_path, body))
    moved = sum(move.moved_bytes for move in moves)
    assert moved <= received <= moved + 8 * sum(len(s.segments) for move in moves for s in move.streams)


def test_a_participant_killed_in_the_move_raises_on_its_peers(tmp_path: Path) -> None:
    move, state = plan_move(SHAPE, TP2_PP2, DP3, CLUSTER, chunk_bytes=512), labels.state_of(SHAPE, TP2_PP2)

    def body(rank: int, transport: Gloo) -> str:
        if rank == 0:  # comes to the agreement, then dies without a word
            said = {"digest": move.digest, "near": False, "on_host": True, "problem": "", "word": None}
            transport.all_gather(json.dumps(said).encode())
            return "gone"
        device = move.participants[rank]
        try:
            execute(move, device, state[device], transport)
        except TransportError as error:
            return type(error).__name__
        return "moved"

    assert "moved" not in run_forked(4, tmp_path, body)
