"""`execute`: one participant's part of a move. Old buffers are only read; what comes back is proven, or an error rises.

hash at the source -> agree (plan digest, buffers, equal replicas) -> copy what stays -> messages in round order ->
hash at the destination -> unanimous verdict. Whatever goes wrong, the old buffers are as they were.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from suika.core.cluster import Device
from suika.reshard.buffers import Pieces, Side, allocate, check_buffers, same_bits
from suika.reshard.hashing import tensor_hashes
from suika.reshard.moveplan import MovePlan
from suika.reshard.nearby import Nearby
from suika.reshard.rounds import WINDOW, Message
from suika.reshard.routes import Demand
from suika.reshard.transports.base import Transport, Work


class MoveError(RuntimeError):
    """The move did not happen; every participant raises, old buffers are untouched."""


class ReplicaMismatchError(MoveError):
    """Two old owners hold different values of the same element: neither can be trusted to be the right one."""


class VerificationError(MoveError):
    """Bytes arrived that differ from those that were sent."""


@dataclass
class MoveReport:
    """What one participant did. `allocated_bytes`: new buffers; `staging_bytes`: packed messages in flight, at most."""

    received_bytes: int = 0
    sent_bytes: int = 0
    local_copy_bytes: int = 0  # same device, but cut differently
    kept_bytes: int = 0  # rebound
    adopted_bytes: int = 0  # of those received: came with a buffer that was taken over as it is, no byte copied
    hashed_bytes: int = 0
    allocated_bytes: int = 0
    staging_bytes: int = 0
    phase_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.phase_s[name] = time.perf_counter() - start


def execute(
    plan: MovePlan,
    me: Device,
    old_buffers: Mapping[str, torch.Tensor],
    transport: Transport,
    new_buffers: Mapping[str, torch.Tensor] | None = None,
    near: Nearby | None = None,
) -> tuple[dict[str, torch.Tensor], MoveReport]:
    """Carry out `plan` as device `me`; returns the buffers of the new plan (none for a leaver) and a report.

    `new_buffers`: what `allocate` gave earlier, so that page faults stay out of the pause. `near`: what
    `Nearby.prepare` gave earlier, on all participants or none; it brings the new buffers along. Kept buffers come back
    as the same tensors. Raises `MoveError` on all participants alike, or `TransportError` when a peer or link is gone.
    """
    if near is not None:
        new_buffers = near.buffers
    mover = _Mover(plan, plan.index(me), old_buffers, transport, near)
    report = mover.report
    with report.phase("hash"):
        mine = mover.hash_sources()
    with report.phase("agree"):
        mover.agree(mine)
    with report.phase("allocate"):
        mover.bind(allocate(plan, mover.me, old_buffers) if new_buffers is None else new_buffers)
    with report.phase("copy"):
        mover.copy_residents()
    with report.phase("transfer"):
        mover.transfer()
    with report.phase("verify"):
        mover.verify()
    return mover.new.buffers, report


def reshard(plan: MovePlan, tensors: Mapping[str, torch.Tensor], transport: Transport) -> dict[str, torch.Tensor]:
    """`execute` as the participant that `transport` is; returns the new shards."""
    return execute(plan, plan.participants[transport.rank], tensors, transport)[0]


class _Mover:
    def __init__(
        self, plan: MovePlan, me: int, old: Mapping[str, torch.Tensor], transport: Transport, near: Nearby | None
    ) -> None:
        self.plan, self.me, self.transport, self.near = plan, me, transport, near
        self.old = Side(dict(old), plan.old.regions(me))
        self.new = Side({}, plan.new.regions(me))
        self.kept = plan.kept(me)
        self.adopted: Collection[str] = near.adopted if near is not None else ()
        self.report = MoveReport()
        self.problem = ""
        self.source_hashes: dict[int, np.ndarray] = {}  # group -> hash of each cell, as its holders have it

    def hash_sources(self) -> dict[int, np.ndarray]:
        """Group -> hashes of its cells, of all groups that others hold too or will receive from here."""
        self.problem = self._unfit()
        if self.problem:
            return {}
        return {
            group: self._hashes(self.old, group)
            for group, demand in enumerate(self.plan.demands)
            if self.me in demand.holders and (len(demand.holders) > 1 or self._is_relied_on(demand))
        }

    def _is_relied_on(self, demand: Demand) -> bool:
        """Whether somebody will check what it receives against this holder's hash."""
        others = set(demand.needers).difference(demand.holders)
        return any(self.near is None or not self.near.proven(demand.holders, other) for other in others)

    def agree(self, mine: dict[int, np.ndarray]) -> None:
        """Same plan, buffers as the plan says, replicas equal (those nobody will use, too): or nobody starts."""
        said = {"digest": self.plan.digest, "near": self.near is not None, "problem": self.problem}
        head = json.dumps(said).encode()
        everyone = [said.partition(b"\n") for said in self.transport.all_gather(head + b"\n" + _pack_hashes(mine))]
        heads = [json.loads(head) for head, _, _ in everyone]
        for device, said in zip(self.plan.participants, heads, strict=False):
            if said["problem"]:
                raise MoveError(f"{device}: {said['problem']}")
        plans = {(said["digest"], said["near"]) for said in heads}
        if len(plans) > 1:
            raise MoveError(f"participants hold different move plans: {sorted(plans)}")
        self._compare_replicas([_unpack_hashes(packed) for _, _, packed in everyone])

    def _unfit(self) -> str:
        """What keeps this participant from taking part, or nothing."""
        size = len(self.plan.participants)
        if (self.transport.rank, self.transport.size) != (self.me, size):
            return (
                f"transport is rank {self.transport.rank} of {self.transport.size}, "
                f"the plan has participant {self.me} of {size}"
            )
        return check_buffers(self.old.buffers, self.plan.old.specs(self.me))

    def _compare_replicas(self, everyone: list[dict[int, np.ndarray]]) -> None:
        for group, demand in enumerate(self.plan.demands):
            first = demand.holders[0]
            if group not in everyone[first]:
                continue
            self.source_hashes[group] = everyone[first][group]
            for other in demand.holders[1:]:
                differing = np.flatnonzero(everyone[first][group] != everyone[other][group])
                if len(differing):
                    key, box, _ = self.plan.groups[group].cells[int(differing[0])]
                    names = " and ".join(self.plan.old.name(p) for p in (first, other))
                    raise ReplicaMismatchError(f"{key.kind} of {key.tensor}{box} differs between {names}")

    def bind(self, buffers: Mapping[str, torch.Tensor]) -> None:
        problem = check_buffers(buffers, self.plan.new.specs(self.me))
        if problem:
            raise MoveError(f"{self.plan.participants[self.me]}, new side: {problem}")
        self.new.buffers.update(buffers)
        sizes = {name: t.numel() * t.element_size() for name, t in buffers.items()}
        self.report.kept_bytes = sum(size for name, size in sizes.items() if name in self.kept)
        adopted_bytes = sum(size for name, size in sizes.items() if name in self.adopted)
        self.report.allocated_bytes = sum(sizes.values()) - self.report.kept_bytes - adopted_bytes

    def copy_residents(self) -> None:
        """Cells that stay on this device but not in the same buffer, each compared with its source."""
        for group, demand in enumerate(self.plan.demands):
            if self.me not in demand.needers or self.me not in demand.holders:
                continue
            for cell in self.plan.groups[group].cells:
                if self.new.buffer_of(cell) in self.kept or self.new.buffer_of(cell) in self.adopted:
                    continue
                source, target = self.old.view(cell), self.new.view(cell)
                target.copy_(source)
                self.report.local_copy_bytes += cell.num_bytes
                if not same_bits(target, source):
                    self.problem = f"{cell.key.kind} of {cell.key.tensor}{cell.box} was copied wrongly"

    def transfer(self) -> None:
        """What arrives from old owners; then, if anything is handed on inside nodes, what arrives from those."""
        hops = [[m for m in self.plan.messages if self.plan.streams[m.stream].hop == hop] for hop in (0, 1)]
        self._exchange(hops[0])
        if hops[1]:
            if self.near is not None:
                self.transport.all_gather(b"")  # what neighbours will read has arrived
            self._exchange(hops[1])

    def _exchange(self, messages: Iterable[Message]) -> None:
        """Post own messages in round order, a window of them at a time, and finish them in the same order; in between
        read what neighbours hold."""
        in_flight: deque[tuple[Work, Pieces | None]] = deque()

        def finish_one() -> None:
            work, arrived = in_flight.popleft()
            work.wait()
            if arrived is not None:
                arrived.unpack()

        for message in messages:
            stream = self.plan.streams[message.stream]
            if self.me not in (stream.src, stream.dst):
                continue
            if self.near is not None and self.near.reads(stream):
                if stream.dst == self.me:
                    copied, adopted, problem = self.near.read(stream, message, self.new)
                    self.report.received_bytes += copied + adopted
                    self.report.adopted_bytes += adopted
                    self.problem = self.problem or problem
                continue
            if len(in_flight) >= WINDOW:
                finish_one()
            sending = stream.src == self.me
            side = self.old if sending and stream.hop == 0 else self.new
            pieces = Pieces.of(stream, message, self.plan.groups, side)
            self.report.staging_bytes = max(
                self.report.staging_bytes,
                pieces.staging_bytes + sum(p.staging_bytes for _, p in in_flight if p is not None),
            )
            if sending:
                in_flight.append((self.transport.send(stream.dst, message.round, pieces.pack()), None))
                self.report.sent_bytes += message.stop - message.start
            else:
                in_flight.append((self.transport.recv(stream.src, message.round, pieces.wire), pieces))
                self.report.received_bytes += message.stop - message.start
        while in_flight:
            finish_one()

    def verify(self) -> None:
        """Hash what arrived, in the live buffers, against the source; then all must agree that all is well."""
        for group, demand in enumerate(self.plan.demands):
            if self.problem or self.me not in demand.needers or self.me in demand.holders:
                continue
            if self.near is not None and self.near.proven(demand.holders, self.me):
                continue  # compared while it was copied
            differing = np.flatnonzero(self._hashes(self.new, group) != self.source_hashes[group])
            if len(differing):
                key, box, _ = self.plan.groups[group].cells[int(differing[0])]
                self.problem = f"{key.kind} of {key.tensor}{box} arrived changed on {self.plan.new.name(self.me)}"
        for verdict in self.transport.all_gather(self.problem.encode()):
            if verdict:
                raise VerificationError(verdict.decode())

    def _hashes(self, side: Side, group: int) -> np.ndarray:
        self.report.hashed_bytes += self.plan.groups[group].num_bytes
        return np.array(tensor_hashes([side.view(cell) for cell in self.plan.groups[group].cells]), dtype=np.uint64)


def _pack_hashes(hashes: Mapping[int, np.ndarray]) -> bytes:
    counts = np.array([(group, len(row)) for group, row in hashes.items()], dtype=np.uint64).reshape(-1, 2)
    return b"".join([np.uint64(len(counts)).tobytes(), counts.tobytes(), *(row.tobytes() for row in hashes.values())])


def _unpack_hashes(packed: bytes) -> dict[int, np.ndarray]:
    words = np.frombuffer(packed, dtype=np.uint64)
    num = int(words[0])
    counts = words[1 : 1 + 2 * num].reshape(num, 2).astype(np.int64)
    rows = np.split(words[1 + 2 * num :], np.cumsum(counts[:, 1])[:-1]) if num else []
    return {int(group): row for (group, _), row in zip(counts, rows, strict=True)}
