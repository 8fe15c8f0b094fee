"""A move without a job: the same plan, transports and number of processes, in processes of their own.

Two things are measured. The move itself on labelled state: every element is a function of its place in the model, so
each one can be checked where it arrives. And the bare links: the very chunks of the move between the same pairs, in the
same order, contiguous, unhashed and uncompared. Entry of a forked process: `main`; its reader: `measure`.
"""

from __future__ import annotations

import math
import queue
import statistics
import time
import zlib
from collections import deque
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from suika.core.cluster_file import cluster_from_dict
from suika.core.job import JobSpec
from suika.core.model import ModelSpec
from suika.core.plan import Plan
from suika.core.tensors import logical_tensors
from suika.reshard.buffers import Side, parts
from suika.reshard.execute import execute
from suika.reshard.links import Links
from suika.reshard.moveplan import Holdings, MovePlan, plan_move
from suika.reshard.nearby import Nearby
from suika.reshard.rounds import WINDOW
from suika.reshard.state import JobShape, Region
from suika.reshard.transports import memfd
from suika.reshard.transports.base import Work
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.mixed import Mixed
from suika.runtime.groups import build_group
from suika.runtime.messages import Channel, Message, Processes
from suika.runtime.worker import keep_to_a_core

ENTRY = "suika.bench.bare:main"
LAPS = 5
_WAIT_S = 300.0


@dataclass(frozen=True)
class BareMove:
    """Seconds are of the slowest participant, bytes summed over all or, where it says so, of the worst."""

    exact: bool  # every element of the new state is, bit by bit, the one its place calls for
    moved_bytes: int  # received from another device
    adopted_bytes: int  # of those: no byte was copied
    kept_copied_bytes: int  # in kept buffers that came back as other memory
    recut_bytes: int  # copied inside a device, because the new layout cuts them differently
    peak_extra_bytes: int  # worst rank: held at once - max(old, new)
    transfer_s: float  # of the move
    phase_s: dict[str, float]
    bare_s: float  # of the same chunks alone, median of the laps
    worst_bytes: int  # copied into the participant that received most


def measure(
    spec: JobSpec, old: Plan, new: Plan, processes: Processes, cluster: Any, folder: Path, name: str
) -> BareMove:
    """Fork the participants of the move, let them carry it out, and sum up what they say."""
    news: queue.SimpleQueue[Message] = queue.SimpleQueue()
    devices = sorted({*old.devices, *new.devices}, key=cluster.position.__getitem__)
    (folder / f"{name}.store").unlink(missing_ok=True)
    launch = {"spec": spec.model_dump(mode="json"), "old": old.to_dict(), "new": new.to_dict(),
              "cluster": cluster.to_dict(), "store": str(folder / f"{name}.store")}  # fmt: skip
    for device in devices:
        processes.spawn(f"{name}.{device}", device.node, ENTRY, {**launch, "device": str(device)}, news.put)
    said: list[Message] = []
    while len(said) < len(devices):
        event = news.get(timeout=_WAIT_S)
        if event["event"] == "message":
            said.append(event["message"])
        elif event["event"] == "exit" and event["code"] != 0:
            raise RuntimeError(f"{event['process']} ended with {event['code']}")
    laps = [max(times) for times in zip(*(m["laps_s"] for m in said), strict=True)]
    return BareMove(
        exact=all(m["exact"] for m in said),
        moved_bytes=sum(m["received_bytes"] for m in said),
        adopted_bytes=sum(m["adopted_bytes"] for m in said),
        kept_copied_bytes=sum(m["kept_copied_bytes"] for m in said),
        recut_bytes=sum(m["recut_bytes"] for m in said),
        peak_extra_bytes=max(m["peak_extra_bytes"] for m in said),
        transfer_s=max(m["phase_s"]["transfer"] for m in said),
        phase_s={phase: max(m["phase_s"][phase] for m in said) for phase in said[0]["phase_s"]},
        bare_s=statistics.median(laps),
        worst_bytes=max(m["received_bytes"] - m["adopted_bytes"] for m in said),
    )


def main(channel: Channel, launch: Message) -> None:
    """One participant."""
    torch.set_num_threads(1)
    spec = JobSpec.model_validate(launch["spec"])
    cluster = cluster_from_dict(launch["cluster"])
    plan = plan_move(JobShape.of(spec), Plan.from_dict(launch["old"]), Plan.from_dict(launch["new"]), cluster)
    device = next(d for d in plan.participants if str(d) == launch["device"])
    keep_to_a_core(device.index)
    me, size = plan.index(device), len(plan.participants)
    wire = Gloo(build_group(dist.FileStore(launch["store"], size), "bare", me, size, _WAIT_S))
    transport = Mixed.of(wire, Links(cluster, plan.participants).node)
    moved, adopted = _move(plan, me, spec, transport)
    channel.send({**moved, "laps_s": _laps(plan, me, adopted, transport)})
    wire.all_gather(b"")  # nobody goes before all are done


class _Chunk(NamedTuple):
    """One message as this participant sees it: `read` is a copy from a neighbour's memory."""

    way: str
    peer: int
    round: int
    num_bytes: int


def _move(plan: MovePlan, me: int, spec: JobSpec, transport: Mixed) -> tuple[dict[str, Any], frozenset[str]]:
    """What the move did here, and the buffers that were adopted."""
    old = labelled(plan.old, me, spec.model, spec.sequence_length)
    old_bytes = memfd.held_bytes()
    near = Nearby.prepare(plan, me, old, transport, memfd.empty)
    transport.all_gather(b"")
    new, report = execute(plan, plan.participants[me], old, transport, near=near)
    held = memfd.held_bytes() + report.staging_bytes
    kept = plan.kept(me)
    rewritten = [name for name, source in kept.items() if new[name].data_ptr() != old[source].data_ptr()]
    adopted = near.adopted
    del near
    old.clear()
    new_bytes = memfd.held_bytes()
    said = {
        "exact": is_labelled(plan.new, me, spec.model, spec.sequence_length, new),
        "received_bytes": report.received_bytes,
        "adopted_bytes": report.adopted_bytes,
        "kept_copied_bytes": sum(new[name].numel() * new[name].element_size() for name in rewritten),
        "recut_bytes": report.local_copy_bytes,
        "peak_extra_bytes": held - max(old_bytes, new_bytes),
        "phase_s": report.phase_s,
    }
    return said, adopted


def labelled(side: Holdings, me: int, model: ModelSpec, sequence_length: int) -> dict[str, torch.Tensor]:
    """What participant `me` holds on this side, every element with its label."""
    shapes = {t.name: t.shape for t in logical_tensors(model, sequence_length)}
    buffers = {name: memfd.empty(shape, getattr(torch, dtype)) for name, (shape, dtype) in side.specs(me).items()}
    for region in side.regions(me):
        flat = buffers[region.buffer].view(-1)
        flat[region.offset : region.offset + region.box.numel] = _label(region, shapes[region.key.tensor], flat.dtype)
    return buffers


def is_labelled(
    side: Holdings, me: int, model: ModelSpec, sequence_length: int, buffers: Mapping[str, torch.Tensor]
) -> bool:
    """Whether every element that `me` must hold has its label."""
    shapes = {t.name: t.shape for t in logical_tensors(model, sequence_length)}
    for region in side.regions(me):
        got = buffers[region.buffer].view(-1)[region.offset : region.offset + region.box.numel]
        if not torch.equal(got, _label(region, shapes[region.key.tensor], got.dtype)):
            return False
    return True


def _label(region: Region, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Finite bit patterns that tell the elements of a region apart by tensor, kind and place."""
    places = torch.arange(math.prod(shape), dtype=torch.int32).view(shape)[region.box.slices].reshape(-1)
    bits = places * 0x61C88647 + zlib.crc32(f"{region.key.kind}/{region.key.tensor}".encode()) % (1 << 31)
    if dtype == torch.float32:
        return (bits & 0x3F7FFFFF).view(torch.float32)
    return (bits & 0xFFFF).to(dtype)


def _laps(plan: MovePlan, me: int, adopted: Container[str], transport: Mixed) -> list[float]:
    """Seconds of each lap of this participant's chunks. They stream through as much memory as the move's do."""
    chunks = _chunks(plan, me, adopted, transport)
    sent = sum(chunk.num_bytes for chunk in chunks if chunk.way == "send")
    received = sum(chunk.num_bytes for chunk in chunks if chunk.way != "send")
    here = memfd.empty((max(sent, *plan.received_bytes, 1),), torch.uint8).fill_(1)
    there = torch.full((received,), 2, dtype=torch.uint8)
    sources = {peer: lent.view("out") for peer, lent in transport.lend({"out": here}).items()}
    laps = []
    for _ in range(LAPS):
        transport.all_gather(b"")
        start = time.perf_counter()
        _lap(chunks, here, there, sources, transport)
        laps.append(time.perf_counter() - start)
    transport.all_gather(b"")
    return laps


def _chunks(plan: MovePlan, me: int, adopted: Container[str], transport: Mixed) -> list[_Chunk]:
    """What this participant has to do, in the move's order."""
    near = transport.neighbours | {me} if transport.near is not None else frozenset({me})
    target = Side({}, plan.new.regions(me))
    chunks = []
    for message in plan.messages:
        stream, num_bytes = plan.streams[message.stream], message.stop - message.start
        if me not in (stream.src, stream.dst):
            continue
        if not {stream.src, stream.dst} <= near:
            way, peer = ("send", stream.dst) if stream.src == me else ("receive", stream.src)
            chunks.append(_Chunk(way, peer, message.round, num_bytes))
        elif stream.dst == me:
            found = parts(stream, message, plan.groups)
            wanted = sum(part.high - part.low for part in found if target.buffer_of(part.cell) not in adopted)
            chunks.append(_Chunk("read", stream.src, message.round, wanted))
    return chunks


def _lap(
    chunks: list[_Chunk],
    here: torch.Tensor,
    there: torch.Tensor,
    sources: dict[int, torch.Tensor],
    transport: Mixed,
) -> None:
    in_flight: deque[Work] = deque()
    sent = received = 0
    for way, peer, number, num_bytes in chunks:
        if len(in_flight) >= WINDOW:
            in_flight.popleft().wait()
        if way == "send":
            in_flight.append(transport.wire.send(peer, number, here[sent : sent + num_bytes]))
            sent += num_bytes
            continue
        target = there[received : received + num_bytes]
        if way == "receive":
            in_flight.append(transport.wire.recv(peer, number, target))
        else:
            target.copy_(sources[peer][received : received + num_bytes])
        received += num_bytes
    while in_flight:
        in_flight.popleft().wait()
