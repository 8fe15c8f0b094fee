"""The labelled-element oracle: every element of the state is a number that says where in the model it belongs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache

import torch

from suika.core.cluster import Cluster, Device, Node
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.reshard.execute import MoveReport, execute
from suika.reshard.moveplan import MovePlan, plan_move
from suika.reshard.state import JobShape, StateKey, buffer_specs, rank_regions
from suika.reshard.transports.inprocess import Hub

Buffers = dict[str, torch.Tensor]


def cluster(nodes: int = 3, devices: int = 3) -> Cluster:
    return Cluster(tuple(Node(f"n{i}", devices, "cpu") for i in range(nodes)))


def plan(shape: JobShape, layout: Layout, devices: tuple[Device, ...]) -> Plan:
    return Plan(layout.resolve(shape.model), Placement(devices))


@cache
def _code(key: StateKey) -> int:
    import zlib

    return zlib.crc32(f"{key.kind} {key.tensor}".encode())


def label(key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole logical tensor: element x carries (tensor, kind, x), as far as the dtype has bits to say it."""
    numel = 1
    for n in shape:
        numel *= n
    index = torch.arange(numel, dtype=torch.int64).reshape(shape)
    if dtype == torch.bfloat16:  # 8 bits of fraction: a scrambled pattern that never is NaN
        bits = (index * 40503 + _code(key)) % 0x7F00
        return bits.to(torch.int16).view(torch.bfloat16)
    if dtype == torch.float32:
        return ((index * 2654435761 + _code(key)) % 0x7F000000).to(torch.int32).view(torch.float32)
    return (_code(key) * 2**20 + index).to(dtype)


def labelled_buffers(shape: JobShape, plan: Plan, rank: int) -> Buffers:
    """What `rank` must hold: every element with its label."""
    from suika.core.tensors import logical_tensors

    whole = {t.name: t.shape for t in logical_tensors(shape.model, shape.sequence_length)}
    args = (shape.model, plan.layout, shape.sequence_length, shape.precision, rank, plan.order)
    buffers = {
        name: torch.full(size, torch.nan, dtype=getattr(torch, dtype))
        for name, (size, dtype) in buffer_specs(*args).items()
    }
    for key, box, buffer, offset in rank_regions(*args):
        flat = buffers[buffer].view(-1)
        flat[offset : offset + box.numel] = label(key, whole[key.tensor], flat.dtype)[box.slices].reshape(-1)
    assert not any(torch.isnan(b).any() for b in buffers.values()), "an element belongs to no region"
    return buffers


def state_of(shape: JobShape, plan: Plan) -> dict[Device, Buffers]:
    return {device: labelled_buffers(shape, plan, rank) for rank, device in enumerate(plan.devices)}


def move_in_threads(
    move: MovePlan, state: Mapping[Device, Buffers], hub: Hub | None = None
) -> dict[Device, tuple[Buffers, MoveReport]]:
    """Carry out a move with one thread per participant; raises what the first failing participant raised."""
    hub = hub or Hub(len(move.participants), timeout_s=20)
    results: dict[Device, tuple[Buffers, MoveReport]] = {}
    errors: list[BaseException] = []

    def run(device: Device, transport: object) -> None:
        try:
            results[device] = execute(move, device, state.get(device, {}), transport)  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    pairs = zip(move.participants, hub.transports(), strict=True)
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a participant hangs"
    if errors:
        raise errors[0]
    assert hub.unmatched() == 0
    return results


def move_labelled(shape: JobShape, old: Plan, new: Plan, where: Cluster) -> MovePlan:
    """Move labelled state in threads and compare every element of the result with its label, bit by bit."""
    move = plan_move(shape, old, new, where, chunk_bytes=512)
    state = state_of(shape, old)
    results = move_in_threads(move, state)
    for device in move.participants:
        got, _ = results[device]
        expected = labelled_buffers(shape, new, new.devices.index(device)) if device in new.devices else {}
        assert got.keys() == expected.keys()
        for name in expected:
            same = torch.equal(got[name].view(-1).view(torch.uint8), expected[name].view(-1).view(torch.uint8))
            assert same, f"{name} on {device} is not what its labels say"
    return move
