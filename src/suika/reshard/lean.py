"""Moves in pieces, for devices that cannot hold the old and the new state side by side.

A piece is a small move by itself: some tensors of one kind, with every buffer that holds part of them. Once all have
agreed that a piece has arrived, its old buffers go; then comes the next. The list of pieces that are done is the ledger
of who owns what: `undo` moves them back, last first. That needs every participant: a death leaves the state in two
halves, and the job goes on from its snapshot.

What must be held at once is the larger of the two states and one piece, not their sum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from suika.core.cluster import Device
from suika.core.errors import SpecError
from suika.core.redeployment import Mode
from suika.reshard.buffers import Make
from suika.reshard.execute import WAVES, MoveError, Mover
from suika.reshard.links import Links
from suika.reshard.memory import peaks, size_of
from suika.reshard.moveplan import BufferSpecs, CellGroup, Holdings, MovePlan, schedule_move
from suika.reshard.nearby import Nearby, adoptions
from suika.reshard.report import MoveReport
from suika.reshard.routes import Demand
from suika.reshard.state import Region, StateKey
from suika.reshard.tensors import BoxGroup
from suika.reshard.transports.base import Transport


@dataclass(frozen=True)
class PartHoldings:
    """Of `whole`, the buffers in which one piece lies."""

    whole: Holdings
    buffers: Mapping[int, frozenset[str]]  # by participant

    def regions(self, participant: int) -> Sequence[Region]:
        mine = self.buffers.get(participant, frozenset())
        return [region for region in self.whole.regions(participant) if region.buffer in mine]

    def specs(self, participant: int) -> BufferSpecs:
        mine = self.buffers.get(participant, frozenset())
        return {name: spec for name, spec in self.whole.specs(participant).items() if name in mine}

    def name(self, participant: int) -> str:
        return self.whole.name(participant)


@dataclass(frozen=True)
class Piece:
    """One step of a lean move, and the way back."""

    there: MovePlan
    back: MovePlan


def pieces_of(plan: MovePlan, links: Links) -> list[Piece]:
    """`plan` in pieces, weights first; a pure function. Tensors that share a buffer anywhere cannot be parted; what can
    is put together again up to two chunks on the participant that needs most of it."""
    found = []
    for number, keys in enumerate(_packed(plan, _inseparable(plan))):
        groups: list[CellGroup] = []
        demands, back = [], []
        for group, (holders, needers, _, late) in zip(plan.groups, plan.demands, strict=True):
            cells = tuple(cell for cell in group.cells if cell.key in keys)
            if cells:
                groups.append(BoxGroup(cells))
                demands.append(Demand(holders, needers, groups[-1].num_bytes, late))
                back.append(Demand(needers, holders, groups[-1].num_bytes, late))
        old, new = (
            PartHoldings(side, _buffers(plan, side, keys, empty_ones=number == 0)) for side in (plan.old, plan.new)
        )
        identity = f"{plan.digest}/{number}"
        found.append(
            Piece(
                schedule_move(links, old, new, groups, demands, identity, plan.chunk_bytes),
                schedule_move(links, new, old, groups, back, f"{identity}/back", plan.chunk_bytes),
            )
        )
    return found


def lean_peaks(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Bytes that each participant holds at once, at most: what is left of the old state, what has come of the new one,
    one piece of it, and messages in flight (an upper bound)."""
    found = []
    for participant in range(len(pieces[0].there.participants)):
        steps = [peaks(piece.there)[participant] for piece in pieces]
        left, come, most = sum(step.source for step in steps), 0, 0
        for step in steps:
            most = max(most, left + come + step.target - step.kept + step.staging + step.scratch)
            left, come = left - step.source, come + step.target
        found.append(most)
    return tuple(found)


def fitting_mode(plan: MovePlan, links: Links, available_bytes: Sequence[int], lean: bool = False) -> Mode:
    """Side by side if every node has the memory for it and `lean` is not wished for, else in pieces.

    `available_bytes`: what the node of each participant can still give; those of a node share it. A pure function, so
    that all participants come to the same. Raises `SpecError` when not even pieces fit.
    """
    nodes: dict[int, list[int]] = defaultdict(list)
    for participant, node in enumerate(links.node):
        nodes[node].append(participant)
    has = {node: min(available_bytes[p] for p in members) for node, members in nodes.items()}
    now = peaks(plan)
    more = [max(0, peak.keep - peak.source) for peak in now]

    def fits() -> bool:
        return all(sum(more[p] for p in members) <= has[node] for node, members in nodes.items())

    if not lean and fits():
        return "keep"
    if not lean:  # what changes hands as it is needs no memory; found out only where it matters
        for members in nodes.values():
            for participant, names in adoptions(plan, members).items():
                specs = plan.new.specs(participant)
                more[participant] = max(0, more[participant] - size_of({name: specs[name] for name in names}))
        if fits():
            return "keep"
    least = [max(0, most - peak.source) for most, peak in zip(lean_peaks(pieces_of(plan, links)), now, strict=True)]
    for node, members in nodes.items():
        needed = sum(least[p] for p in members)
        if needed > has[node]:
            name = links.devices[members[0]].node
            problem = f"piece by piece it still needs {needed:,} bytes more than now, {has[node]:,} are available"
            raise SpecError("move", name, problem, "move onto more devices, or through a snapshot")
    return "lean"


class LeanMove:
    """One participant's part of a move in pieces. `old` is emptied on the way: nobody else may hold its buffers."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        device: Device,
        old: dict[str, torch.Tensor],
        transport: Transport,
        make: Make | None = None,
    ) -> None:
        self.old, self.new = old, dict[str, torch.Tensor]()
        self.reports: list[MoveReport] = []
        self._pieces, self._device, self._transport, self._make = pieces, device, transport, make
        self._done = 0  # the ledger: so many pieces belong to their new owners
        self._under_way = False  # a piece may have arrived on some participants and not on others

    @property
    def is_torn(self) -> bool:
        """Whether there is no common way back after an error of this participant alone: some pieces are over there, and
        the others may or may not have the one in question."""
        return self._done > 0 and (self._under_way or self._done < len(self._pieces))

    def run(self) -> dict[str, torch.Tensor]:
        """The new buffers. When a piece is refused, by anybody, all is as it was and `MoveError` rises on everybody; a
        `TransportError` means that a participant or link is gone, and with it the way back."""
        try:
            for piece in self._pieces:
                self._carry(piece.there, self.old, self.new)
                self._done += 1
        except MoveError:
            self.undo()
            raise
        return self.new

    def undo(self) -> dict[str, torch.Tensor]:
        """Move back what has been moved; the old buffers, in new memory. All participants call it together."""
        while self._done:
            self._carry(self._pieces[self._done - 1].back, self.new, self.old)
            self._done -= 1
        return self.old

    def _carry(self, plan: MovePlan, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        """One piece arrives, is verified by all, and leaves where it was. `MoveError`, which rises on all alike, leaves
        it where it was."""
        self._under_way = True
        try:
            self._carry_whole(plan, source, target)
        except MoveError:
            self._under_way = False
            raise
        self._under_way = False

    def _carry_whole(self, plan: MovePlan, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> None:
        me = plan.index(self._device)
        leaving = {name: source[name] for name in plan.old.specs(me)}
        try:
            near, problem = Nearby.prepare(plan, me, leaving, self._transport, self._make), ""
        except MemoryError as error:
            near, problem = None, f"MemoryError: {error}"
        mover = Mover(plan, self._device, leaving, self._transport, near=near, problem=problem)
        mover.agree()
        for wave in WAVES:
            mover.carry(wave)
        mover.settle()
        self.reports.append(mover.report)
        target |= mover.new.buffers
        for name in leaving:
            del source[name]


def _inseparable(plan: MovePlan) -> Iterator[frozenset[StateKey]]:
    """Sets of state that share buffers, directly or through others; in the order of the plan's groups."""
    above: dict[StateKey, StateKey] = {}

    def root(key: StateKey) -> StateKey:
        while above.setdefault(key, key) != key:
            key = above[key] = above[above[key]]
        return key

    for side in (plan.old, plan.new):
        for participant in range(len(plan.participants)):
            first: dict[str, StateKey] = {}
            for region in side.regions(participant):
                above[root(region.key)] = root(first.setdefault(region.buffer, region.key))
    together: dict[StateKey, dict[StateKey, None]] = defaultdict(dict)
    for group in plan.groups:
        for cell in group.cells:
            together[root(cell.key)][cell.key] = None
    yield from map(frozenset, together.values())


def _packed(plan: MovePlan, sets: Iterator[frozenset[StateKey]]) -> list[frozenset[StateKey]]:
    packed: list[frozenset[StateKey]] = []
    filled = 0
    for keys in sets:
        needed = max(
            sum(region.box.numel for region in plan.new.regions(p) if region.key in keys)
            for p in range(len(plan.participants))
        )
        needed *= max(cell.item_bytes for group in plan.groups for cell in group.cells if cell.key in keys)
        if packed and filled + needed <= 2 * plan.chunk_bytes:
            packed[-1] |= keys
            filled += needed
        else:
            packed.append(keys)
            filled = needed
    return packed


def _buffers(plan: MovePlan, side: Holdings, keys: frozenset[StateKey], empty_ones: bool) -> dict[int, frozenset[str]]:
    """Participant -> its buffers that hold some of `keys`, and those that hold nothing at all."""
    found = {}
    for participant in range(len(plan.participants)):
        regions = side.regions(participant)
        mine = {region.buffer for region in regions if region.key in keys}
        if empty_ones:
            mine |= side.specs(participant).keys() - {region.buffer for region in regions}
        found[participant] = frozenset(mine)
    return found
