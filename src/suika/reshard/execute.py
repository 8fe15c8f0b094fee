"""`execute`: one participant's part of a move. Old buffers are only read; what comes back is proven, or an error rises.

lay out (new buffers, messages) -> agree (same plan, all able) -> copy what stays, messages in round order, hashed as
they leave and arrive -> compare (equal replicas, equal hashes at both ends) -> unanimous verdict. Weights come in a
first wave, all else in a second. Whatever goes wrong, the old buffers are as they were.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from suika.core.cluster import Device
from suika.reshard.bits import copied, same_bits
from suika.reshard.buffers import Side, allocate, check_buffers
from suika.reshard.cells import Cell
from suika.reshard.exchange import Exchange
from suika.reshard.moveplan import MovePlan
from suika.reshard.nearby import Nearby
from suika.reshard.proof import CellHashes, pack_hashes, unpack_hashes
from suika.reshard.report import MoveReport
from suika.reshard.routes import Demand
from suika.reshard.transports.base import Transport

WEIGHTS, REST = WAVES = 0, 1


class MoveError(RuntimeError):
    """The move did not happen; every participant raises, old buffers are untouched."""


class ReplicaMismatchError(MoveError):
    """Two old owners hold different values of the same element: neither can be trusted to be the right one."""


class VerificationError(MoveError):
    """Bytes arrived that differ from those that were sent."""


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
    mover = Mover(plan, me, old_buffers, transport, new_buffers, near)
    mover.agree()
    for wave in WAVES:
        mover.carry(wave)
    mover.settle()
    return mover.new.buffers, mover.report


def reshard(plan: MovePlan, tensors: Mapping[str, torch.Tensor], transport: Transport) -> dict[str, torch.Tensor]:
    """`execute` as the participant that `transport` is; returns the new shards."""
    return execute(plan, plan.participants[transport.rank], tensors, transport)[0]


class Mover:
    """`execute` in steps: made (and laid out) before the pause, then `agree`, `carry` each wave, `settle`. The waves
    may run in different threads, one after the other. Nothing raises before `agree`, which raises for all."""

    def __init__(
        self,
        plan: MovePlan,
        device: Device,
        old_buffers: Mapping[str, torch.Tensor],
        transport: Transport,
        new_buffers: Mapping[str, torch.Tensor] | None = None,
        near: Nearby | None = None,
        problem: str = "",
    ) -> None:
        """`problem`: why this participant cannot take part after all; `agree` tells the others."""
        self.plan, self.me, self.transport, self.near = plan, plan.index(device), transport, near
        self.old = Side(dict(old_buffers), plan.old.regions(self.me))
        self.new = Side({}, plan.new.regions(self.me))
        self.report = MoveReport()
        self._kept = plan.kept(self.me)
        self._adopted: Collection[str] = near.adopted if near is not None else ()
        self._sources = CellHashes(self.old, plan.groups, self.report)
        self._arrived = CellHashes(self.new, plan.groups, self.report)
        self._exchange: Exchange | None = None
        with self.report.phase("allocate"):
            self._problem = problem or self._lay_out(near.buffers if near is not None else new_buffers)

    def agree(self, word: Any = None) -> list[Any]:
        """Same plan, buffers as the plan says, memory for the new ones: or nobody starts. Returns everybody's `word`
        (anything that JSON can carry), by participant."""
        with self.report.phase("agree"):
            said = {"digest": self.plan.digest, "near": self.near is not None, "on_host": self._is_on_host()}
            said |= {"problem": self._problem, "word": word}
            heads = [json.loads(head) for head in self.transport.all_gather(json.dumps(said).encode())]
        for device, head in zip(self.plan.participants, heads, strict=False):
            if head["problem"]:
                raise MoveError(f"{device}: {head['problem']}")
        plans = {(head["digest"], head["near"]) for head in heads}
        if len(plans) > 1:
            raise MoveError(f"participants hold different move plans: {sorted(plans)}")
        # One of an older version does not say: it knows the other hash only.
        self._sources.on_host = self._arrived.on_host = all(head.get("on_host", False) for head in heads)
        return [head["word"] for head in heads]

    def carry(self, wave: int) -> None:
        """What stays on this device but not in its buffer; what arrives from old owners; then, if anything is handed on
        inside nodes, what arrives from those."""
        assert self._exchange is not None
        with self.report.phase("copy"):
            self._copy_residents(wave)
        with self.report.phase("transfer"):
            self._blame(self._exchange.run(wave, 0))
            if any(stream.hop and stream.wave == wave for stream in self.plan.streams):
                if self.near is not None:
                    self.transport.all_gather(b"")  # what neighbours will read has arrived
                self._blame(self._exchange.run(wave, 1))

    def settle(self) -> None:
        """Replicas equal (those nobody used, too), arrivals equal to their sources, in the live buffers; then all must
        agree that all is well."""
        with self.report.phase("verify"):
            mine = self._sources.of_groups(self._vouched_for())
            mismatch = self._compare_with_neighbours()
            everyone = [unpack_hashes(said) for said in self.transport.all_gather(pack_hashes(mine))]
            self._compare_arrivals(self._compare_replicas(everyone))
            verdicts = self.transport.all_gather(json.dumps([mismatch, self._problem]).encode())
        for found, problem in map(json.loads, verdicts):
            if found:
                raise ReplicaMismatchError(found)
            if problem:
                raise VerificationError(problem)

    def _is_on_host(self) -> bool:
        return all(t.device.type == "cpu" for side in (self.old, self.new) for t in side.buffers.values())

    def _lay_out(self, buffers: Mapping[str, torch.Tensor] | None) -> str:
        """Make everything ready; what keeps this participant from taking part, or nothing."""
        plan, size = self.plan, len(self.plan.participants)
        if (self.transport.rank, self.transport.size) != (self.me, size):
            return (
                f"transport is rank {self.transport.rank} of {self.transport.size}, "
                f"the plan has participant {self.me} of {size}"
            )
        if problem := check_buffers(self.old.buffers, plan.old.specs(self.me)):
            return problem
        try:
            found = allocate(plan, self.me, self.old.buffers) if buffers is None else buffers
            if problem := check_buffers(found, plan.new.specs(self.me)):
                return f"new side: {problem}"
            self.new.buffers.update(found)
            sides, hashes = (self.old, self.new), (self._sources, self._arrived)
            self._exchange = Exchange(plan, self.me, self.transport, self.near, sides, hashes, self.report)
        except (MemoryError, RuntimeError) as error:  # torch says the latter when an allocation is refused
            return f"{type(error).__name__}: {error}"
        sizes = {name: t.numel() * t.element_size() for name, t in found.items()}
        self.report.kept_bytes = sum(size for name, size in sizes.items() if name in self._kept)
        adopted_bytes = sum(size for name, size in sizes.items() if name in self._adopted)
        self.report.allocated_bytes = sum(sizes.values()) - self.report.kept_bytes - adopted_bytes
        return ""

    def _copy_residents(self, wave: int) -> None:
        """Cells that stay on this device but not in the same buffer, each compared with its source."""
        for group, demand in enumerate(self.plan.demands):
            if demand.late != (wave == REST) or self.me not in demand.needers or self.me not in demand.holders:
                continue
            for cell in self.plan.groups[group].cells:
                if self.new.buffer_of(cell) in self._kept or self.new.buffer_of(cell) in self._adopted:
                    continue
                source, target = self.old.view(cell), self.new.view(cell)
                self.report.local_copy_bytes += cell.num_bytes
                if not copied(target, source):
                    self._blame(f"{cell.key.kind} of {cell.key.tensor}{cell.box} was copied wrongly")

    def _vouched_for(self) -> list[int]:
        """Groups held here that others hold too, or whose receivers check them against this holder's hash."""
        return [
            group
            for group, demand in enumerate(self.plan.demands)
            if self.me in demand.holders
            and (self._is_relied_on(demand) or (len(demand.holders) > 1 and not self._is_compared(demand)))
        ]

    def _is_compared(self, demand: Demand) -> bool:
        """Whether its holders look into each other's memory: reading both copies costs less than two hashes."""
        return self.near is not None and self.near.sees_all(demand.holders)

    def _compare_with_neighbours(self) -> str:
        """Replicas inside this node whose hashes nobody needs. The holders form a ring; of each cell's ring one edge is
        left out, another one from cell to cell, so that all of them have as much to read."""
        near = self.near
        for group, demand in enumerate(self.plan.demands):
            holders = demand.holders
            if self.me not in holders or len(holders) < 2 or not self._is_compared(demand) or near is None:
                continue
            if self._is_relied_on(demand):
                continue  # hashed
            place = holders.index(self.me)
            other = holders[(place + 1) % len(holders)]
            for number, cell in enumerate(self.plan.groups[group].cells):
                if number % len(holders) == place:
                    continue
                if not same_bits(self.old.view(cell), near.sides[0, other].view(cell)):
                    return self._mismatch(cell, self.me, other)
        return ""

    def _mismatch(self, cell: Cell, one: int, other: int) -> str:
        names = " and ".join(self.plan.old.name(p) for p in sorted((one, other)))
        return f"{cell.key.kind} of {cell.key.tensor}{cell.box} differs between {names}"

    def _is_relied_on(self, demand: Demand) -> bool:
        others = set(demand.needers).difference(demand.holders)
        return any(self.near is None or not self.near.proven(demand.holders, other) for other in others)

    def _compare_replicas(self, everyone: list[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
        """Group -> its hashes, on which all of its holders agree."""
        found = {}
        for group, demand in enumerate(self.plan.demands):
            first = demand.holders[0]
            if group not in everyone[first]:
                continue
            found[group] = everyone[first][group]
            for other in demand.holders[1:]:
                differing = np.flatnonzero(found[group] != everyone[other][group])
                if len(differing):
                    cell = self.plan.groups[group].cells[int(differing[0])]
                    raise ReplicaMismatchError(self._mismatch(cell, first, other))
        return found

    def _compare_arrivals(self, sources: Mapping[int, np.ndarray]) -> None:
        came = [
            group
            for group, demand in enumerate(self.plan.demands)
            if self.me in demand.needers
            and self.me not in demand.holders
            # else it was compared while it was copied
            and (self.near is None or not self.near.proven(demand.holders, self.me))
        ]
        for group, arrived in self._arrived.of_groups([] if self._problem else came).items():
            differing = np.flatnonzero(arrived != sources[group])
            if len(differing):
                key, box, _ = self.plan.groups[group].cells[int(differing[0])]
                self._blame(f"{key.kind} of {key.tensor}{box} arrived changed on {self.plan.new.name(self.me)}")

    def _blame(self, problem: str) -> None:
        """The first one counts."""
        self._problem = self._problem or problem
