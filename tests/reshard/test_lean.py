"""Moves in pieces: labelled state arrives whole, goes back whole, and a refusal on one device leaves all as it was."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import labels
import pytest
import torch

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Plan
from suika.reshard.execute import MoveError
from suika.reshard.lean import LeanMove
from suika.reshard.links import Links
from suika.reshard.moveplan import plan_move
from suika.reshard.pieces import Piece, pieces_of
from suika.reshard.state import JobShape
from suika.reshard.transports.base import TransportError
from suika.reshard.transports.inprocess import Hub

CLUSTER = labels.cluster(nodes=2, devices=3)
MODEL = ModelSpec("small", "llama", 4, 24, 36, 6, 30, kv_heads=2, tied=True)
SHAPE = JobShape(MODEL, 6, "bf16")
PAIRS = [
    (Layout(tp=2, pp=2), Layout(tp=1, pp=2, dp=3)),
    (Layout(dp=4, zero_buckets="stage"), Layout(tp=3, pp=2)),
    (Layout(tp=2, dp=3), Layout(pp=4)),
    (Layout(pp=2), Layout(pp=2, dp=2)),
]


def _case(old: Layout, new: Layout) -> tuple[Plan, Plan, Sequence[Piece]]:
    before = labels.plan(SHAPE, old, CLUSTER.devices[: old.num_ranks])
    after = labels.plan(SHAPE, new, CLUSTER.devices[::-1][: new.num_ranks])
    move = plan_move(SHAPE, before, after, CLUSTER, chunk_bytes=512)
    return before, after, pieces_of(move, Links(CLUSTER, move.participants))


def _moves(before: Plan, pieces: Sequence[Piece]) -> list[LeanMove]:
    state = labels.state_of(SHAPE, before)
    devices = pieces[0].there.participants
    ways = Hub(len(devices), timeout_s=20).transports()
    return [LeanMove(pieces, d, dict(state.get(d, {})), way) for d, way in zip(devices, ways, strict=True)]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_there_and_back(old: Layout, new: Layout) -> None:
    before, after, pieces = _case(old, new)
    assert len(pieces) > 4
    moves = _moves(before, pieces)
    labels.in_threads([move.run for move in moves])
    devices = pieces[0].there.participants
    assert not any(move.old for move in moves)
    labels.check_labels(SHAPE, after, {d: m.new for d, m in zip(devices, moves, strict=True) if d in after.devices})
    labels.in_threads([move.undo for move in moves])
    assert not any(move.new for move in moves)
    labels.check_labels(SHAPE, before, {d: m.old for d, m in zip(devices, moves, strict=True) if d in before.devices})


def test_a_refused_allocation_halfway_leads_back_on_every_device() -> None:
    before, _, pieces = _case(*PAIRS[0])
    moves = _moves(before, pieces)
    asked = []

    def refuse(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        asked.append(size)
        if len(asked) == 12:
            raise MemoryError("no more")
        return torch.empty(tuple(size), dtype=dtype)

    moves[3]._make = refuse
    refused = []

    def run(move: LeanMove) -> None:
        with pytest.raises(MoveError, match="MemoryError: no more"):
            move.run()
        refused.append(move)

    labels.in_threads([partial(run, move) for move in moves])
    assert len(refused) == len(moves)
    assert not any(move.is_torn for move in moves)
    state = {d: m.old for d, m in zip(pieces[0].there.participants, moves, strict=True) if d in before.devices}
    labels.check_labels(SHAPE, before, state)


@pytest.mark.parametrize(("call", "torn"), [(1, False), (12, True)])
def test_who_fails_alone_knows_whether_there_is_a_way_back(call: int, torn: bool) -> None:
    """In the first piece nobody has let go of anything; later the others are inside of a piece that never ends."""
    before, _, pieces = _case(*PAIRS[0])
    moves = _moves(before, pieces)
    hub, asked = moves[0]._transport.hub, []  # type: ignore[attr-defined]

    def fail(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        asked.append(size)
        if len(asked) == call:
            hub.break_link("one is gone")
            raise OSError("cannot map")
        return torch.empty(tuple(size), dtype=dtype)

    moves[3]._make = fail

    def run(move: LeanMove) -> None:
        with pytest.raises(OSError if move is moves[3] else TransportError, match="cannot map|one is gone"):
            move.run()

    labels.in_threads([partial(run, move) for move in moves])
    assert moves[3].is_torn == torn
    if not torn:
        state = {d: m.undo() for d, m in zip(pieces[0].there.participants, moves, strict=True) if d in before.devices}
        labels.check_labels(SHAPE, before, state)
