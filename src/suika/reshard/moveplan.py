"""`plan_move`: one job's move from an old plan to a new one, complete before anything stops.

Everybody derives the same `MovePlan` from the same inputs and agrees on its digest before the first byte. It holds
groups and flows only; what a participant packs, sends and checks is expanded by the participant itself (`execute.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from suika.core.cluster import Cluster, Device, Link
from suika.core.plan import Plan
from suika.reshard.cells import Cell, groups_of
from suika.reshard.links import Links
from suika.reshard.rounds import Message, Stream, check_order, messages_of, streams_of
from suika.reshard.routes import Demand, Flow, LinkLoad, check_flows, route
from suika.reshard.state import JobShape, Region, buffer_specs, rank_regions

CHUNK_BYTES = 4 << 20  # on CPU; measured best over gloo on loopback (docs/numbers/reshard.md)

BufferSpecs = Mapping[str, tuple[tuple[int, ...], str]]


class Holdings(Protocol):
    """What each participant holds on one side of a move; nothing for those that are not part of it."""

    def regions(self, participant: int) -> Sequence[Region]: ...

    def specs(self, participant: int) -> BufferSpecs: ...

    def name(self, participant: int) -> str:
        """The participant, for messages."""
        ...


class CellGroup(Protocol):
    """Cells with the same holders on both sides; their bytes, one cell after the other, are the group's stream."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def cells(self) -> Sequence[Cell]: ...

    @property
    def ends(self) -> Sequence[int]:
        """Where each cell ends in the stream."""
        ...


@dataclass(frozen=True)
class PlanHoldings:
    """A job's state under a plan."""

    shape: JobShape
    plan: Plan
    rank_of: Mapping[int, int]  # participant -> rank

    @staticmethod
    def of(shape: JobShape, plan: Plan, participants: Sequence[Device]) -> PlanHoldings:
        index = {device: i for i, device in enumerate(participants)}
        return PlanHoldings(shape, plan, {index[device]: rank for rank, device in enumerate(plan.devices)})

    def regions(self, participant: int) -> Sequence[Region]:
        rank = self.rank_of.get(participant)
        s = self.shape
        layout, order = self.plan.layout, self.plan.order
        return () if rank is None else rank_regions(s.model, layout, s.sequence_length, s.precision, rank, order)

    def specs(self, participant: int) -> BufferSpecs:
        rank = self.rank_of.get(participant)
        s = self.shape
        layout, order = self.plan.layout, self.plan.order
        return {} if rank is None else buffer_specs(s.model, layout, s.sequence_length, s.precision, rank, order)

    def name(self, participant: int) -> str:
        rank = self.rank_of.get(participant)
        return "a device outside the plan" if rank is None else f"rank {rank} on {self.plan.devices[rank]}"


@dataclass(frozen=True, eq=False)
class MovePlan:
    """Who sends what to whom, in which order. Participants are named by index, in cluster order.

    moved_bytes: received from another device, fan-out included; network_bytes: of those, between nodes;
    resident_bytes: needed where they already are.
    """

    participants: tuple[Device, ...]
    old: Holdings
    new: Holdings
    groups: tuple[CellGroup, ...]
    demands: tuple[Demand, ...]
    streams: tuple[Stream, ...]
    messages: tuple[Message, ...]
    chunk_bytes: int
    received_bytes: tuple[int, ...]  # per participant, from other devices
    moved_bytes: int
    network_bytes: int
    resident_bytes: int
    load: LinkLoad
    digest: str

    def index(self, device: Device) -> int:
        """Position of `device` among the participants; raises KeyError when it has no part in the move."""
        return self._index[device]

    @cached_property
    def _index(self) -> dict[Device, int]:
        return {device: i for i, device in enumerate(self.participants)}

    @cached_property
    def num_rounds(self) -> int:
        return self.messages[-1].round + 1 if self.messages else 0

    @cached_property
    def forwards(self) -> bool:
        """Whether something that arrives from another node is handed on inside the node."""
        return any(stream.hop for stream in self.streams)

    def expand(self, participant: int) -> None:
        """Spell out the cells of the participant's groups now, so that it does not happen inside the pause."""
        for group, demand in zip(self.groups, self.demands, strict=True):
            if participant in demand.holders or participant in demand.needers:
                _ = group.ends

    def kept(self, participant: int) -> dict[str, str]:
        """New buffer -> old buffer with the very same contents: rebound, not copied."""
        old, new = self.old.specs(participant), self.new.specs(participant)
        holding = {(spec, contents_of(self.old, participant).get(name)): name for name, spec in old.items()}
        contents = contents_of(self.new, participant)
        found: dict[str, str] = {}
        for name, spec in new.items():
            source = holding.get((spec, contents.get(name)))
            if source is not None and contents.get(name) is not None:
                found[name] = source
        return found


def contents_of(side: Holdings, participant: int) -> dict[str, tuple[object, ...]]:
    """Buffer -> what of the state lies in it, in order; buffers without elements are absent."""
    found: dict[str, list[object]] = {}
    for region in side.regions(participant):
        found.setdefault(region.buffer, []).append((region.key, region.box, region.offset))
    return {name: tuple(parts) for name, parts in found.items()}


def plan_move(
    shape: JobShape,
    old: Plan,
    new: Plan,
    cluster: Cluster,
    *,
    links: Mapping[str, Link] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> MovePlan:
    """The move of a job from `old` to `new`. Participants are the devices of both, in cluster order."""
    participants = tuple(sorted({*old.devices, *new.devices}, key=cluster.position.__getitem__))
    index = {device: i for i, device in enumerate(participants)}
    groups = groups_of(shape, old.layout, new.layout, old.order, new.order)
    at_old, at_new = [index[d] for d in old.devices], [index[d] for d in new.devices]
    demands = [
        Demand(tuple(at_old[r] for r in g.old), tuple(at_new[r] for r in g.new), g.num_bytes, not g.weights)
        for g in groups
    ]
    identity = repr((shape, old.to_dict(), new.to_dict(), sorted(cluster.links.items()), links))
    return schedule_move(
        Links(cluster, participants, links or {}),
        PlanHoldings.of(shape, old, participants),
        PlanHoldings.of(shape, new, participants),
        groups,
        demands,
        identity,
        chunk_bytes,
    )


def schedule_move(
    links: Links,
    old: Holdings,
    new: Holdings,
    groups: Sequence[CellGroup],
    demands: Sequence[Demand],
    identity: str,
    chunk_bytes: int,
) -> MovePlan:
    """Route the demands and put the messages in order; `identity` is hashed into the digest with everything derived."""
    flows, load = route(demands, links, chunk_bytes)
    streams = streams_of(flows, {group for group, demand in enumerate(demands) if demand.late})
    messages = messages_of(streams, chunk_bytes)
    check_flows(demands, flows)  # a plan is validated once, totally, before anything moves
    check_order(streams, messages)
    received = [0] * len(links.devices)
    for flow in flows:
        received[flow.dst] += flow.stop - flow.start
    across = sum(f.stop - f.start for f in flows if links.node[f.src] != links.node[f.dst])
    resident = sum(d.num_bytes * len(set(d.holders).intersection(d.needers)) for d in demands)
    return MovePlan(
        participants=tuple(links.devices),
        old=old,
        new=new,
        groups=tuple(groups),
        demands=tuple(demands),
        streams=tuple(streams),
        messages=tuple(messages),
        chunk_bytes=chunk_bytes,
        received_bytes=tuple(received),
        moved_bytes=sum(received),
        network_bytes=across,
        resident_bytes=resident,
        load=load,
        digest=_digest(identity, links.devices, flows, messages),
    )


def _digest(identity: str, devices: Sequence[Device], flows: list[Flow], messages: list[Message]) -> str:
    """Stable across processes: hashes inputs and everything derived from them."""
    hasher = hashlib.sha256(identity.encode())
    hasher.update(repr([str(device) for device in devices]).encode())
    for rows in (flows, messages):
        hasher.update(np.array(rows, dtype=np.int64).tobytes())
    return hasher.hexdigest()[:16]
