"""A move in pieces, each a small move by itself: some tensors, with every buffer that holds part of them. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from suika.reshard.links import Links
from suika.reshard.memory import peaks
from suika.reshard.moveplan import BufferSpecs, CellGroup, Holdings, MovePlan, schedule_move
from suika.reshard.routes import Demand
from suika.reshard.state import Region, StateKey
from suika.reshard.tensors import BoxGroup


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
