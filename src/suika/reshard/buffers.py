"""Local buffers seen as cells: views, allocation, and the parcels in which messages leave and enter them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from suika.reshard.cells import Cell
from suika.reshard.moveplan import BufferSpecs, CellGroup, MovePlan
from suika.reshard.regions import Box, flat_range
from suika.reshard.rounds import Message, Stream
from suika.reshard.state import Region, StateKey

Make = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def allocate(
    plan: MovePlan,
    me: int,
    old_buffers: Mapping[str, torch.Tensor],
    make: Make | None = None,
    adopted: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """New buffers of participant `me`: kept ones are the old tensors, adopted ones those given, all others are filled
    with NaN, never with zeros, so that an element nobody wrote cannot pass for a value. `make` gives memory for
    (shape, dtype); by default torch does, on the old buffers' device."""
    plan.expand(me)  # allocation is where moves are prepared
    kept, found = plan.kept(me), {}
    device = next((t.device for t in old_buffers.values()), torch.device("cpu"))
    for name, (shape, dtype) in plan.new.specs(me).items():
        if name in kept:
            found[name] = old_buffers[kept[name]]
            continue
        if adopted and name in adopted:
            found[name] = adopted[name]
            continue
        kind = getattr(torch, dtype)
        found[name] = torch.empty(shape, dtype=kind, device=device) if make is None else make(shape, kind)
        if found[name].is_floating_point():
            found[name].fill_(torch.nan)
        else:
            found[name].view(torch.uint8).fill_(0xFF)
    return found


def check_buffers(buffers: Mapping[str, torch.Tensor], specs: BufferSpecs) -> str:
    """What is wrong with `buffers` against `specs`, or nothing."""
    if buffers.keys() != specs.keys():
        return (
            f"missing buffers {sorted(specs.keys() - buffers.keys())}, unknown {sorted(buffers.keys() - specs.keys())}"
        )
    for name, (shape, dtype) in specs.items():
        tensor = buffers[name]
        is_dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), is_dtype) != (tuple(shape), dtype):
            return f"buffer {name} is {tuple(tensor.shape)} {is_dtype}, the plan says {tuple(shape)} {dtype}"
        if not tensor.is_contiguous():
            return f"buffer {name} is not contiguous"
        if tensor.is_neg():  # its memory holds the negatives
            return f"buffer {name} is a negated view: pass its resolve_neg()"
    return ""


class Side:
    """One participant's buffers on one side of a move."""

    def __init__(self, buffers: dict[str, torch.Tensor], regions: Sequence[Region]) -> None:
        self.buffers = buffers
        self._regions: dict[StateKey, list[Region]] = {}
        for region in regions:
            self._regions.setdefault(region.key, []).append(region)
        self._views: dict[Region, torch.Tensor] = {}

    def buffer_of(self, cell: Cell) -> str:
        return self._region(cell).buffer

    def view(self, cell: Cell) -> torch.Tensor:
        """The cell's elements inside the live buffer: writing to it writes the state."""
        region = self._region(cell)
        if region not in self._views:
            flat = self.buffers[region.buffer].detach().view(-1)
            self._views[region] = flat[region.offset : region.offset + region.box.numel].view(region.box.shape)
        return self._views[region][cell.box.shifted(region.box.starts).slices]

    def _region(self, cell: Cell) -> Region:
        return next(region for region in self._regions[cell.key] if region.box.contains(cell.box))


class Part(NamedTuple):
    """Bytes [low, high) of cell number `number` of a group, at `at` on the wire."""

    at: int
    group: int
    number: int
    cell: Cell
    low: int
    high: int


def parts(stream: Stream, message: Message, groups: Sequence[CellGroup]) -> Iterator[Part]:
    """What a message is made of, in stream order."""
    for offset, group, start, stop in stream.segments:
        first = max(start, start + message.start - offset)
        last = min(stop, start + message.stop - offset)
        if first >= last:
            continue
        at = offset + first - start - message.start
        cells, ends = groups[group].cells, groups[group].ends
        for i in range(bisect_right(ends, first), len(cells)):
            begin = ends[i] - cells[i].num_bytes
            if begin >= last:
                break
            low, high = max(first - begin, 0), min(last - begin, cells[i].num_bytes)
            yield Part(at, group, i, cells[i], low, high)
            at += high - low


def parcels(found: Iterable[Part], long_bytes: int) -> Iterator[list[Part]]:
    """A message's parts as they go on the wire: long ones alone, so that they need not be packed, and what lies between
    them together. Both ends cut alike."""
    small: list[Part] = []
    for part in found:
        if part.high - part.low < long_bytes:
            small.append(part)
            continue
        if small:
            yield small
            small = []
        yield [part]
    if small:
        yield small


class Parcel:
    """Some parts at one end. What lies in one piece in memory goes as it is (`direct`), the rest through staging."""

    def __init__(self, found: Sequence[Part], side: Side) -> None:
        first = found[0].at
        self.num_bytes = found[-1].at + found[-1].high - found[-1].low - first
        self._views: list[tuple[int, torch.Tensor]] = []  # (offset on the wire, view)
        for at, _, _, cell, low, high in found:
            for view in _views(side.view(cell), cell, low, high):
                self._views.append((at - first, view))
                at += view.numel() * view.element_size()
        self.direct = self._in_place()

    def pack(self, wire: torch.Tensor) -> None:
        for target, view in self._staged(wire):
            target.copy_(view)

    def unpack(self, wire: torch.Tensor) -> None:
        for source, view in self._staged(wire):
            view.copy_(source)

    def _staged(self, wire: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for at, view in self._views:
            num_bytes = view.numel() * view.element_size()
            yield wire[at : at + num_bytes].view(view.dtype).view(view.shape), view

    def _in_place(self) -> torch.Tensor | None:
        """The bytes themselves, if the views follow each other in one buffer as they do on the wire."""
        _, first = self._views[0]
        storage, start = first.untyped_storage(), first.data_ptr()
        reached = 0
        for at, view in self._views:
            follows = at == reached and view.data_ptr() == start + at and view.is_contiguous()
            if not follows or view.untyped_storage().data_ptr() != storage.data_ptr():
                return None
            reached += view.numel() * view.element_size()
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        return flat.set_(storage, start - storage.data_ptr(), (reached,))  # type: ignore[call-overload]


def boxes(cell: Cell, low: int, high: int) -> Iterator[Box]:
    """Bytes [low, high) of a cell, counted from the cell's own origin: the same boxes wherever the cell lies."""
    return flat_range(Box.whole(cell.box.shape), low // cell.item_bytes, high // cell.item_bytes)


def _views(view: torch.Tensor, cell: Cell, low: int, high: int) -> Iterator[torch.Tensor]:
    """Views of bytes [low, high) of a cell, as few as its place allows."""
    if (low, high) == (0, cell.num_bytes):
        yield view
    elif view.is_contiguous():
        yield view.reshape(-1)[low // cell.item_bytes : high // cell.item_bytes]
    else:
        for box in boxes(cell, low, high):
            yield view[box.slices]
