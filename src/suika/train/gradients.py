"""Gradients of a rank: flat per ZeRO bucket, accumulated over micro-batches, reduced once per step.

Sums here keep to one rule: an element's sum does not depend on where in a buffer it lies (ranks are added in order,
two at a time). That makes copies that live at different places, a tied embedding's or a replicated norm's, bit-equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from suika.core.tensors import LogicalTensor
from suika.reshard.state import Bucket, zero_slice
from suika.train.axis import Axis, Replicas, fold, wait


class BucketGradients:
    """The flat gradient of one bucket, and the part of it that each replica reduces."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.bucket = bucket
        # Written to, not just reserved: page faults come while another generation trains, not in this one's first step.
        self.flat = torch.empty(bucket.numel, dtype=dtype).zero_()
        self.views = {
            tensor.name: self.flat[at : at + math.prod(shape)].view(shape)
            for tensor, shape, at in zip(bucket.tensors, bucket.shapes, bucket.offsets, strict=True)
        }
        slices = [
            bucket.slice_of(r) if bucket.sharded else zero_slice(bucket.numel, bucket.replicas, r)
            for r in range(bucket.replicas)
        ]
        self.parts = [self.flat[start:stop] for start, stop in slices]

    @property
    def owned(self) -> Tensor:
        """The part that this rank's optimizer uses: its slice, or everything without ZeRO."""
        start, stop = self.bucket.slice
        return self.flat[start:stop]


class OwnedGradient(Protocol):
    """What the optimizer needs of a bucket's gradient once it is reduced."""

    bucket: Bucket

    @property
    def owned(self) -> Tensor: ...


class ReducedGradients:
    """What is alike whether gradients are whole on every replica or not: where they are partial, what counts."""

    buckets: Sequence[OwnedGradient]

    def __init__(self, buckets: tuple[Bucket, ...], tp: Axis, ends: Axis, sequence_parallel: bool) -> None:
        self.tp, self.ends, self.sequence_parallel = tp, ends, sequence_parallel
        self._counted = [list(_counted_runs(b, tp, ends)) for b in buckets]

    def square_sum(self) -> Tensor:
        """This rank's share of the squared norm of the model's gradient, fp64: each logical element counts once."""
        total = torch.zeros((), dtype=torch.float64)
        for gradients, runs in zip(self.buckets, self._counted, strict=True):
            owned = gradients.owned
            for start, stop in runs:
                total += torch.linalg.vector_norm(owned[start:stop], dtype=torch.float64).square_()
        return total


class Gradients(ReducedGradients):
    """All buckets of a rank and the reductions that a step needs, in the order in which they must happen."""

    buckets: tuple[BucketGradients, ...]

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        dtype: torch.dtype,
        tp: Axis,
        replicas: Replicas,
        ends: Axis,
        sequence_parallel: bool,
    ) -> None:
        super().__init__(buckets, tp, ends, sequence_parallel)
        self.buckets = tuple(BucketGradients(bucket, dtype) for bucket in buckets)
        self.views = {name: view for b in self.buckets for name, view in b.views.items()}
        self.replicas = replicas
        tensors = [t for bucket in buckets for t in bucket.tensors]
        self._partial = [t for t in tensors if is_partial(t, tp.size, sequence_parallel)]

    def zero(self) -> None:
        for bucket in self.buckets:
            bucket.flat.zero_()

    def reduce(self) -> None:
        """Turn this rank's sums over its micro-batches into sums over the global batch, in `owned` of each bucket."""
        self._sum_over_tp()
        if self.ends.size > 1 and "embedding.weight" in self.views:
            shared = self.views["embedding.weight"]
            shared.copy_(self.ends.sum(shared))
        self._sum_over_dp()

    def _sum_over_tp(self) -> None:
        sum_over_tp(self.tp, self._partial, self.views)

    def _sum_over_dp(self) -> None:
        """Every rank receives the others' versions of its own part and adds them in rank order."""
        split = [(b, self.replicas.of(b.bucket)) for b in self.buckets if b.bucket.replicas > 1]
        exchanges = [axis.exchange(b.parts) for b, axis in split]
        for (bucket, axis), (received, works) in zip(split, exchanges, strict=True):
            wait(works)
            bucket.parts[axis.rank].copy_(fold(received))
        for works in [axis.gather_in_place(b.parts) for b, axis in split if not b.bucket.sharded]:
            wait(works)


def sum_over_tp(tp: Axis, tensors: Sequence[LogicalTensor], grads: Mapping[str, Tensor]) -> None:
    """Sum the gradients of `tensors`, which tp ranks share but compute parts of, in place: one message for all."""
    if not tensors:
        return
    slots = [_slot(t, grads[t.name], tp) for t in tensors]
    summed = tp.sum(torch.cat([whole.flatten() for whole, _ in slots]))
    for tensor, (whole, mine), part in zip(tensors, slots, summed.split([w.numel() for w, _ in slots]), strict=True):
        grads[tensor.name].copy_(part.view(whole.shape)[mine])


def is_partial(tensor: LogicalTensor, tp: int, sequence_parallel: bool) -> bool:
    """Whether tp ranks hold the same elements of `tensor` but only parts of their gradient."""
    if tp == 1:
        return False
    if tensor.tp_dim is None:
        # Each rank saw its own positions, or its part of a product; an expert's last bias is added by the first rank.
        return sequence_parallel or tensor.in_region or tensor.expert is not None
    return _replicated_units(tensor, tp)  # each rank saw its own query heads


def _replicated_units(tensor: LogicalTensor, tp: int) -> bool:
    assert tensor.tp_dim is not None
    return tensor.shared_units and tensor.shape[tensor.tp_dim] // tensor.tp_unit < tp


def _slot(tensor: LogicalTensor, grad: Tensor, tp: Axis) -> tuple[Tensor, slice]:
    """The gradient as a part of something that can be summed over all of tp, and where in it this rank's part is.

    A replicated key/value head lies in the rows of its head: ranks of other heads add zeros to it.
    """
    if tensor.tp_dim is None:
        return grad, slice(None)
    start, stop = tensor.bounds(tp.size, tp.rank)
    whole = grad.new_zeros(tensor.shape)
    whole[start:stop] = grad
    return whole, slice(start, stop)


def _counts(tensor: LogicalTensor, tp: Axis, ends: Axis) -> bool:
    """Whether this rank's copy of `tensor` is the one that the norm counts: the first of its replicas."""
    if tensor.name == "embedding.weight" and ends.rank > 0:
        return False
    if tensor.tp_dim is None:
        return tp.rank == 0
    if _replicated_units(tensor, tp.size) and tp.rank > 0:
        return tensor.bounds(tp.size, tp.rank) != tensor.bounds(tp.size, tp.rank - 1)
    return True


def _counted_runs(bucket: Bucket, tp: Axis, ends: Axis) -> Iterator[tuple[int, int]]:
    """Ranges of a bucket's owned gradient that count for the norm, neighbours merged."""
    if not bucket.sharded and bucket.replica > 0:
        return
    start, stop = bucket.slice
    run: tuple[int, int] | None = None
    for tensor, shape, at in zip(bucket.tensors, bucket.shapes, bucket.offsets, strict=True):
        low, high = max(at, start) - start, min(at + math.prod(shape), stop) - start
        if low >= high or not _counts(tensor, tp, ends):
            continue
        if run and run[1] == low:
            run = (run[0], high)
            continue
        if run:
            yield run
        run = (low, high)
    if run:
        yield run
