"""`Axis`: one mesh axis as a rank sees it, with the collectives that the trainer uses.

Every message of a training step except the pipeline's passes through here. They are built from sends and receives:
over gloo a small message between two processes takes 0.1 ms so, its own collectives need a millisecond or more (see
docs/numbers/train.md). Ranks are always added in rank order, element by element, hence a sum has the same bits on every
rank and does not depend on where in a message an element lies.

An axis of size 1 does nothing at all, so callers never ask whether an axis exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from suika.reshard.state import Bucket
from suika.runtime.profiler import message, span
from suika.runtime.program import RankGroups

# Up to this size each rank sends its whole tensor to the others (one hop); above, sums are made in chunks (two hops,
# but the least bytes). With two ranks both send the same bytes and one hop is always better.
_ONE_HOP_BYTES = 1 << 16
_TAG = 1  # pipelines use tag 0


@dataclass(frozen=True)
class Axis:
    """Position on a mesh axis and the process group along it (None: the axis has size 1)."""

    name: str
    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0

    @staticmethod
    def of(name: str, group: dist.ProcessGroup | None) -> Axis:
        return Axis(name) if group is None else Axis(name, group, group.size(), group.rank())

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' tensors; the same bits on every rank."""
        if self.group is None:
            return tensor
        tensor = tensor.contiguous()
        if self.size == 2 or tensor.nbytes <= _ONE_HOP_BYTES:
            received, works = self.exchange([tensor] * self.size)
            wait(works, self.name)
            return fold(received)
        return self._sum_in_chunks(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, stacked: (size, *shape). All shapes are equal."""
        gathered = tensor.new_empty((self.size, *tensor.shape))
        gathered[self.rank] = tensor
        wait(self.gather_in_place(gathered.unbind()), self.name)
        return gathered

    def sum_and_split(self, tensor: Tensor) -> Tensor:
        """The sum over ranks of `tensor[rank]`: (size, *shape) -> shape."""
        received, works = self.exchange(tensor.contiguous().unbind())
        wait(works, self.name)
        return fold(received)

    def swap(self, tensor: Tensor) -> Tensor:
        """`tensor[r]` of this rank goes to rank r: (size, *shape) -> what each rank sent here, (size, *shape)."""
        received, works = self.exchange(tensor.contiguous().unbind())
        wait(works, self.name)
        return torch.stack(received)

    def trade(self, rows: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
        """The first `leaving[0]` rows go to rank 0, and so on; `coming[r]` rows arrive from rank r, in rank order."""
        if self.group is None:
            return rows
        received = rows.new_empty((sum(coming), *rows.shape[1:]))
        outgoing, incoming = rows.contiguous().split(list(leaving)), received.split(list(coming))
        incoming[self.rank].copy_(outgoing[self.rank])
        wait(self._swap(outgoing, incoming), self.name)
        return received

    def exchange(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
        """Start an all-to-all: `parts[r]` goes to rank r. Returns what arrives from each rank, in rank order (its own
        part as it is), and the works to wait for; until then `parts` must not change. Parts may differ in size."""
        mine = parts[self.rank]
        received = [mine if r == self.rank else torch.empty_like(mine) for r in range(self.size)]
        return received, self._swap(parts, received)

    def gather_in_place(self, parts: Sequence[Tensor]) -> list[dist.Work]:
        """Start an all-gather into `parts`, of which this rank has filled `parts[rank]`. Sizes may differ."""
        return self._swap([parts[self.rank]] * self.size, parts)

    def _sum_in_chunks(self, tensor: Tensor) -> Tensor:
        """Rank r adds chunk r of every rank, then hands it round."""
        out = torch.empty_like(tensor)
        chunks, sums = (whole.view(-1).tensor_split(self.size) for whole in (tensor, out))
        received, works = self.exchange(chunks)
        wait(works, self.name)
        sums[self.rank].copy_(fold(received))
        wait(self.gather_in_place(sums), self.name)
        return out

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[dist.Work]:
        """Start sending `outgoing[r]` to every other rank r and receiving `incoming[r]` from it. Empty ones are not
        sent; both sides know the sizes. Peers start with the next rank, so that not all send to one first."""
        if self.group is None:
            return []
        with message(self.name, "swap", sum(part.nbytes for part in outgoing) - outgoing[self.rank].nbytes, self.size):
            return self._start(outgoing, incoming)

    def _start(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[dist.Work]:
        assert self.group is not None
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        works = [self.group.recv([incoming[r]], r, _TAG) for r in peers if incoming[r].numel()]
        return works + [self.group.send([outgoing[r]], r, _TAG) for r in peers if outgoing[r].numel()]


@dataclass(frozen=True)
class Replicas:
    """Who holds the same shards as this rank: all of the dp axis, or for routed experts a part of it."""

    dense: Axis
    experts: Axis

    @staticmethod
    def of_groups(groups: RankGroups, ep: int) -> Replicas:
        dense = Axis.of("dp", groups.dp)
        return Replicas(dense, Axis.of("dp", groups.expert_dp) if ep > 1 else dense)

    def of(self, bucket: Bucket) -> Axis:
        return self.dense if bucket.tensors[0].expert is None else self.experts


def fold(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors in order: ((p0 + p1) + p2) ... A single one is returned as it is."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total.add_(part)
    return total


def wait(works: Sequence[dist.Work], axis: str = "dp") -> None:
    with span(axis):
        for work in works:
            work.wait()


class _Enter(torch.autograd.Function):
    """Into a tensor-parallel region: the same activations for all; gradients are summed on the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Axis) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return ctx.tp.sum(grad), None


class _Leave(torch.autograd.Function):
    """Out of a tensor-parallel region: partial sums are summed; every rank has the whole gradient already."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Axis) -> Tensor:  # type: ignore[no-untyped-def, override]
        return tp.sum(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return grad, None


def _join_sequence(x: Tensor, tp: Axis) -> Tensor:
    """(B, L/tp, D) of each rank -> (B, L, D)."""
    B, l, D = x.shape
    return tp.gather(x).transpose(0, 1).reshape(B, tp.size * l, D)


def _sum_and_split_sequence(x: Tensor, tp: Axis) -> Tensor:
    """Partial sums (B, L, D) -> this rank's positions of the sum, (B, L/tp, D)."""
    B, L, D = x.shape
    return tp.sum_and_split(x.view(B, tp.size, L // tp.size, D).transpose(0, 1))


class _EnterSequence(torch.autograd.Function):
    """Into a tensor-parallel region from sequence shards: gather positions; gradients are summed and split."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Axis) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.tp = tp
        return _join_sequence(x, tp)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return _sum_and_split_sequence(grad.contiguous(), ctx.tp), None


class _LeaveSequence(torch.autograd.Function):
    """Out of a tensor-parallel region into sequence shards: the mirror of `_EnterSequence`."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: Axis) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.tp = tp
        return _sum_and_split_sequence(x.contiguous(), tp)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def, override]
        return _join_sequence(grad, ctx.tp), None


@dataclass(frozen=True)
class TensorParallel:
    """The tp axis with the two borders of a tensor-parallel region. B = batch, L = sequence, D = hidden.

    Outside of a region activations are whole (B, L, D), or shards of positions (B, L/tp, D) with sequence parallelism.
    """

    axis: Axis
    sequence: bool = False

    def enter(self, x: Tensor) -> Tensor:
        if self.axis.group is None:
            return x
        return (_EnterSequence if self.sequence else _Enter).apply(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        if self.axis.group is None:
            return x
        return (_LeaveSequence if self.sequence else _Leave).apply(x, self.axis)

    def whole(self, x: Tensor) -> Tensor:
        """`enter` for what has no gradient, such as indices (B, L/tp, K)."""
        return _join_sequence(x, self.axis) if self.sequence else x

    def positions(self, length: int) -> slice:
        """The positions of a sequence of `length` that this rank holds outside of a region."""
        if not self.sequence:
            return slice(0, length)
        each = length // self.axis.size
        return slice(self.axis.rank * each, (self.axis.rank + 1) * each)
