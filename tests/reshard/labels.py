"""The labelled-element oracle: every element of the state is a number that says where in the model it belongs."""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from suika.core.cluster import Cluster, Device, Node
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.core.tensors import logical_tensors
from suika.reshard.execute import execute
from suika.reshard.moveplan import MovePlan, plan_move
from suika.reshard.report import MoveReport
from suika.reshard.state import JobShape, StateKey, buffer_specs, rank_regions
from suika.reshard.transports.base import Transport
from suika.reshard.transports.inprocess import Hub

Buffers = dict[str, torch.Tensor]


def cluster(nodes: int = 3, devices: int = 3) -> Cluster:
    return Cluster(tuple(Node(f"n{i}", devices, "cpu") for i in range(nodes)))


def plan(shape: JobShape, layout: Layout, devices: tuple[Device, ...]) -> Plan:
    return Plan(layout.resolve(shape.model), Placement(devices))


@cache
def _code(key: StateKey) -> int:
    return zlib.crc32(f"{key.kind} {key.tensor}".encode())


def label(key: StateKey, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole logical tensor: element x carries (tensor, kind, x), as far as the dtype has bits to say it."""
    index = torch.arange(math.prod(shape), dtype=torch.int64).reshape(shape)
    if dtype == torch.bfloat16:  # 8 bits of fraction: a scrambled pattern that never is NaN
        bits = (index * 40503 + _code(key)) % 0x7F00
        return bits.to(torch.int16).view(torch.bfloat16)
    if dtype == torch.float32:
        return ((index * 2654435761 + _code(key)) % 0x7F000000).to(torch.int32).view(torch.float32)
    return (_code(key) * 2**20 + index).to(dtype)


def labelled_buffers(shape: JobShape, plan: Plan, rank: int) -> Buffers:
    """What `rank` must hold: every element with its label."""
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
    move: MovePlan,
    state: Mapping[Device, Buffers],
    hub: Hub | None = None,
    new_buffers: Mapping[Device, Buffers] | None = None,
) -> dict[Device, tuple[Buffers, MoveReport]]:
    """Carry out a move with one thread per participant; raises what the first failing participant raised."""
    hub = hub or Hub(len(move.participants), timeout_s=20)
    results: dict[Device, tuple[Buffers, MoveReport]] = {}

    def run(device: Device, transport: Transport) -> None:
        ready = None if new_buffers is None else new_buffers.get(device, {})
        results[device] = execute(move, device, state.get(device, {}), transport, ready)

    pairs = zip(move.participants, hub.transports(), strict=True)
    in_threads([partial(run, device, transport) for device, transport in pairs])
    assert hub.unmatched() == 0
    return results


def with_device(hub: Hub, word: bytes = b'"on_host": false, ') -> Hub:
    """`hub`, on which participant 0's word is that its state is on a device (which is not so): all must hash as devices
    do. `word` is empty for one of an older version, which does not say."""
    gather, host = hub.gather, b'"on_host": true, '

    def altered(rank: int, thing: Any) -> list[Any]:
        if rank == 0 and isinstance(thing, bytes) and thing.startswith(b'{"digest"'):
            assert host in thing
            thing = thing.replace(host, word)
        return gather(rank, thing)

    hub.gather = altered  # type: ignore[method-assign]
    return hub


def in_threads(bodies: list[Callable[[], None]]) -> None:
    """Run all at once; raises what the first one to fail raised, or `AssertionError` when one hangs."""
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a participant hangs"
    if errors:
        raise errors[0]


def check_labels(shape: JobShape, plan: Plan, state: Mapping[Device, Buffers]) -> None:
    """Every element of `state` is, bit by bit, the one its place calls for."""
    assert state.keys() == set(plan.devices)
    for rank, device in enumerate(plan.devices):
        expected = labelled_buffers(shape, plan, rank)
        assert state[device].keys() == expected.keys()
        for name, wanted in expected.items():
            got = state[device][name]
            same = torch.equal(got.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8))
            assert same, f"{name} of rank {rank} is not what its labels say"


def move_labelled(shape: JobShape, old: Plan, new: Plan, where: Cluster, on_device: bool = False) -> MovePlan:
    """Move labelled state in threads and check every element of the result; leavers keep nothing."""
    move = plan_move(shape, old, new, where, chunk_bytes=512)
    hub = Hub(len(move.participants), timeout_s=20)
    results = move_in_threads(move, state_of(shape, old), with_device(hub) if on_device else hub)
    assert all(results[device][0] == {} for device in set(old.devices) - set(new.devices))
    check_labels(shape, new, {device: results[device][0] for device in new.devices})
    return move
