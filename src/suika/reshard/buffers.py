"""Local buffers seen as cells: views, allocation, and packing of a message from or into them."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from suika.reshard.cells import Cell
from suika.reshard.moveplan import BufferSpecs, CellGroup, MovePlan
from suika.reshard.regions import Box, flat_range
from suika.reshard.rounds import Message, Stream
from suika.reshard.state import Region, StateKey


def allocate(plan: MovePlan, me: int, old_buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New buffers of participant `me`: kept ones are the old tensors, all others are filled with NaN, never with zeros,
    so that an element nobody wrote cannot pass for a value."""
    kept, found = plan.kept(me), {}
    device = next((t.device for t in old_buffers.values()), torch.device("cpu"))
    for name, (shape, dtype) in plan.new.specs(me).items():
        if name in kept:
            found[name] = old_buffers[kept[name]]
            continue
        found[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
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


@dataclass
class Pieces:
    """One message and the views it is made of: (offset on the wire, view). A single contiguous view goes unpacked."""

    views: list[tuple[int, torch.Tensor]]
    wire: torch.Tensor = field(init=False)  # 1-D uint8
    num_bytes: int
    staging_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        _, first = self.views[0]
        direct = (
            len(self.views) == 1 and first.is_contiguous() and first.numel() * first.element_size() == self.num_bytes
        )
        self.staging_bytes = 0 if direct else self.num_bytes
        if direct:
            self.wire = first.reshape(-1).view(torch.uint8)
        else:
            self.wire = torch.empty(self.num_bytes, dtype=torch.uint8, device=first.device)

    @staticmethod
    def of(stream: Stream, message: Message, groups: Sequence[CellGroup], side: Side) -> Pieces:
        views = []
        for offset, group, start, stop in stream.segments:
            low = max(start, start + message.start - offset)
            high = min(stop, start + message.stop - offset)
            at = offset + low - start - message.start
            if low < high:
                for view in _views(groups[group].cells, low, high, side):
                    views.append((at, view))
                    at += view.numel() * view.element_size()
        return Pieces(views, message.stop - message.start)

    def pack(self) -> torch.Tensor:
        if self.staging_bytes:
            for target, view in self._staged():
                target.copy_(view)
        return self.wire

    def unpack(self) -> None:
        if self.staging_bytes:
            for source, view in self._staged():
                view.copy_(source)

    def _staged(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for at, view in self.views:
            num_bytes = view.numel() * view.element_size()
            yield self.wire[at : at + num_bytes].view(view.dtype).view(view.shape), view


def _views(cells: Sequence[Cell], start: int, stop: int, side: Side) -> Iterator[torch.Tensor]:
    """Views of bytes [start, stop) of a group's stream, in stream order."""
    ends = list(itertools.accumulate(cell.num_bytes for cell in cells))
    for i in range(bisect_right(ends, start), len(cells)):
        cell, begin = cells[i], ends[i] - cells[i].num_bytes
        if begin >= stop:
            return
        low, high = max(start - begin, 0), min(stop - begin, cell.num_bytes)
        view = side.view(cell)
        if (low, high) == (0, cell.num_bytes):
            yield view
        elif view.is_contiguous():
            yield view.reshape(-1)[low // cell.item_bytes : high // cell.item_bytes]
        else:
            for box in flat_range(Box.whole(tuple(view.shape)), low // cell.item_bytes, high // cell.item_bytes):
                yield view[box.slices]
