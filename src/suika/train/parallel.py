"""`Parallel`: the axes along which a rank's layers are cut, and which positions of a sequence that leaves to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from suika.train.axis import Axis, TensorParallel
from suika.train.context import context


@dataclass(frozen=True)
class Parallel:
    """The axes of one rank. B = batch, L = sequence, l = L / cp."""

    tp: TensorParallel
    cp: Axis
    ep: Axis

    def context(self, length: int) -> tuple[slice, ...]:
        """The positions of a sequence of `length` that this rank's cp rank holds, in its order: l of them."""
        return context(self.cp, length)

    def positions(self, length: int) -> tuple[slice, ...]:
        """Those of `context` that this rank holds outside of tensor-parallel regions."""
        held, at, found = self.tp.positions(length // self.cp.size), 0, []
        for part in self.context(length):
            size = part.stop - part.start
            low, high = max(held.start - at, 0), min(held.stop - at, size)
            if low < high:
                found.append(slice(part.start + low, part.start + high))
            at += size
        return tuple(found)

    def sum_over_sequence(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks that hold positions of the same sequences, outside of tensor-parallel regions."""
        return self.cp.sum(self.tp.axis.sum(tensor) if self.tp.sequence else tensor)


def take(tensor: Tensor, parts: tuple[slice, ...], dim: int) -> Tensor:
    """The elements of `tensor` at `parts` of `dim`, one after the other."""
    pieces = [tensor.narrow(dim, part.start, part.stop - part.start) for part in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
