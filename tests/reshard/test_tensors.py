"""Resharding of any named tensors: DTensor placements, explicit boxes, what is refused; B47 over real processes."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from labels import in_threads
from processes import run_forked
from torch.distributed.tensor import Partial, Replicate, Shard

import suika.reshard
from suika.core.errors import SpecError
from suika.reshard import Box, Gloo, Hub, MovePlan, TensorSpec, dtensor_boxes, plan_reshard, reshard
from suika.reshard.buffers import allocate
from suika.reshard.execute import execute


def shards(tensors: dict[str, torch.Tensor], plan: MovePlan, participant: int, side: str) -> dict[str, torch.Tensor]:
    held = getattr(plan, side).regions(participant)
    found = {name: torch.empty(shape, dtype=getattr(torch, dtype))
             for name, (shape, dtype) in getattr(plan, side).specs(participant).items()}  # fmt: skip
    for region in held:
        found[region.buffer] = tensors[region.key.tensor][region.box.slices].contiguous()
    return found


def test_dtensor_boxes_are_cut_as_torch_chunk_does() -> None:
    whole = torch.arange(7 * 5).reshape(7, 5)
    boxes = dtensor_boxes((7, 5), mesh=[3, 2], placements=[Shard(0), 1])
    expected = [part for rows in whole.chunk(3) for part in rows.chunk(2, dim=1)]
    assert all(torch.equal(whole[box.slices], part) for box, part in zip(boxes, expected, strict=True))
    assert dtensor_boxes((4,), [2], [Replicate()]) == [Box((0,), (4,))] * 2
    assert [b.shape for b in dtensor_boxes((3,), [4], [-1])] == [(1,), (1,), (1,), (0,)]
    assert [b.starts[0] for b in dtensor_boxes((8,), [2, 2], [0, 0])] == [0, 2, 4, 6]
    with pytest.raises(SpecError, match="reduce Partial first"):
        dtensor_boxes((4,), [2], [Partial()])
    with pytest.raises(SpecError, match="has 1 dims"):
        dtensor_boxes((4,), [2], [1])


def test_a_3d_tensor_a_scalar_and_several_boxes_move_together() -> None:
    """B25 as well: what is checked are the live receivers, NaN before, among them slices that no row of a 3-D tensor
    holds in one piece. A receiver of another dtype is no receiver (`test_execute.py`): moves never cast."""
    tensors = {"experts": torch.randn(4, 3, 5), "step": torch.tensor(7.0), "ids": torch.arange(10)}
    specs = {n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    by_expert, by_column = (dtensor_boxes((4, 3, 5), [3], [dim]) for dim in (0, 2))
    old = [{"experts": box, "step": Box((), ())} for box in by_expert]
    old[0]["ids"] = Box((0,), (10,))
    new = [{"experts": box, "step": Box((), ())} for box in by_column]
    new[2]["ids"] = [Box((0,), (2,)), Box((8,), (10,))]  # two pieces on one participant
    plan = plan_reshard(specs, old, new, nodes=["a", "a", "b"])
    results: dict[int, dict[str, torch.Tensor]] = {}

    def body(rank: int, transport: Any) -> None:
        mine = shards(tensors, plan, rank, "old")
        live = allocate(plan, rank, mine)
        results[rank], _ = execute(plan, plan.participants[rank], mine, transport, live)
        assert all(results[rank][name] is tensor for name, tensor in live.items())

    in_threads([partial(body, rank, transport) for rank, transport in enumerate(Hub(3, 10).transports())])
    for rank in range(3):
        expected = shards(tensors, plan, rank, "new")
        assert results[rank].keys() == expected.keys()
        assert all(torch.equal(results[rank][name], tensor) for name, tensor in expected.items())
    assert set(results[2]) == {"experts", "step", "ids#0", "ids#1"}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ([{"w": Box((0,), (3,))}], [{"w": Box((0,), (4,))}], r"\[3:4\].*is held by nobody before"),
        ([{"w": Box((0,), (5,))}], [{}], "is outside the tensor"),
        ([{"w": [Box((0,), (3,)), Box((2,), (4,))]}], [{}], "overlaps another box"),
        ([{"x": Box((0,), (3,))}], [{}], "is not one of the tensors"),
        ([{}], [{}, {}], "old has 1 participants"),
    ],
)
def test_what_cannot_be_is_refused(old: Any, new: Any, problem: str) -> None:
    with pytest.raises(SpecError, match=problem):
        plan_reshard({"w": TensorSpec((4,))}, old, new)
    with pytest.raises(SpecError, match="unknown"):
        plan_reshard({"w": TensorSpec((4,), "complex256")}, [{}], [{}])


def random_traffic(rng: random.Random) -> tuple[dict[str, torch.Tensor], MovePlan]:
    """Swaps, rings, one-to-many, many-to-one of unequal sizes, one byte to megabytes, between four participants."""
    tensors, old, new = {}, [{} for _ in range(4)], [{} for _ in range(4)]  # type: ignore[var-annotated]
    for i in range(rng.randint(1, 12)):
        size = rng.choice((1, 2, 1000, rng.randint(1, 100_000), rng.choice((1, 1, 1, 3_000_000))))
        tensors[f"t{i}"] = torch.randint(0, 256, (size,), dtype=torch.uint8)
        owners = rng.sample(range(4), rng.choice((1, 1, 2)))
        needers = [owners[0] ^ 1] if rng.random() < 0.3 else rng.sample(range(4), rng.randint(1, 3))
        for side, participants in ((old, owners), (new, needers)):
            for participant in participants:
                side[participant][f"t{i}"] = Box((0,), (size,))
    specs = {name: TensorSpec(tuple(t.shape), "uint8") for name, t in tensors.items()}
    largest = max(t.numel() for t in tensors.values())
    chunk_bytes = 8 * rng.randint(1 + largest // 320, 1 + largest // 8)
    nodes = rng.choice((["a"] * 4, ["a", "a", "b", "b"], list("abcd")))
    return tensors, plan_reshard(specs, old, new, nodes, chunk_bytes)


@pytest.mark.fault
def test_b47_two_hundred_random_plans_end_on_gloo(tmp_path: Path) -> None:
    """No order of sends and receives can deadlock: all end, all bytes are right; unmatched operations cannot occur."""

    def body(rank: int, transport: Gloo) -> int:
        rng, moved = random.Random(47), 0
        torch.manual_seed(47)
        for _ in range(200):
            tensors, plan = random_traffic(rng)
            got = reshard(plan, shards(tensors, plan, rank, "old"), transport)
            assert all(torch.equal(got[n], t) for n, t in shards(tensors, plan, rank, "new").items())
            moved += plan.received_bytes[rank]
        return moved

    assert sum(run_forked(4, tmp_path, body, timeout_s=90)) > 20e6


def test_names_are_found_without_torch_until_needed() -> None:
    assert all(getattr(suika.reshard, name) is not None for name in suika.reshard.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = suika.reshard.nonsense
