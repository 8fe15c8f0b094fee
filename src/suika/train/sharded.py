"""ZeRO 3: weights live in slices over the replicas and are whole only while a part of the model uses them.

A `Use` is what the model reads at once: a layer, the embedding, the head. Its weights are gathered before it runs and
dropped after; backward gathers them again when it first needs one. Gradients are summed over the replicas as soon as
backward has made them, so whole gradients are as short-lived as whole weights. All replicas do the same in the same
order: each must have as many micro-batches.

Shapes: N = elements of a span (neighbours in a bucket's flat vector), n = those of them in this rank's slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from suika.core.tensors import LogicalTensor
from suika.reshard.state import Bucket
from suika.train.axis import Axis, Replicas, fold, wait
from suika.train.gradients import ReducedGradients, is_partial, sum_over_tp


class SlicedGradient:
    """The sum of a bucket's gradient over replicas and micro-batches, on this rank's slice."""

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        self.bucket = bucket
        start, stop = bucket.slice
        self.owned = torch.empty(stop - start, dtype=dtype).zero_()  # written to: see `BucketGradients`


class SlicedGradients(ReducedGradients):
    """As `Gradients`, for weights in slices: `Span.add` fills it during backward."""

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
        self.replicas = replicas
        self.buckets = tuple(SlicedGradient(bucket, dtype) for bucket in buckets)

    def zero(self) -> None:
        for gradient in self.buckets:
            gradient.owned.zero_()

    def reduce(self) -> None:
        """What backward has not done: both ends of a tied embedding get the sum of their gradients."""
        if self.ends.size == 1:
            return
        for gradient in self.buckets:
            if names := {t.name for t in gradient.bucket.tensors} & {"embedding.weight"}:
                span = Span(gradient.bucket, names, self.replicas.of(gradient.bucket), self)
                span.bind(gradient.owned)
                whole = self.ends.sum(span.gather())
                span.mine.copy_(whole[slice(*span.ranges[span.axis.rank])])


class Span:
    """Neighbouring tensors of one bucket, of which each replica has a part (some have none)."""

    def __init__(self, bucket: Bucket, names: set[str], axis: Axis, gradients: SlicedGradients) -> None:
        at = [i for i, tensor in enumerate(bucket.tensors) if tensor.name in names]
        assert at == list(range(at[0], at[-1] + 1)), f"{sorted(names)} are not neighbours in {bucket.name}"
        self.bucket, self.axis, self.tp = bucket, axis, gradients.tp
        self.tensors, self.shapes = bucket.tensors[at[0] : at[-1] + 1], bucket.shapes[at[0] : at[-1] + 1]
        self.sizes = [torch.Size(shape).numel() for shape in self.shapes]
        self.first, self.numel = bucket.offsets[at[0]], sum(self.sizes)
        # Each replica's part of the span, counted from the span's beginning.
        self.ranges = [self._inside(*bucket.slice_of(r)) for r in range(bucket.replicas)]
        self.partial = [t for t in self.tensors if is_partial(t, self.tp.size, gradients.sequence_parallel)]
        self._sums = next((self._own(g.owned) for g in gradients.buckets if g.bucket is bucket), None)
        self.mine = self.anchor = torch.empty(0)

    def bind(self, weights: Tensor) -> None:
        """`weights`: this rank's slice of the bucket. Its part of the span stays a view of it."""
        self.mine = self._own(weights)
        self.anchor = self.mine.detach().requires_grad_(self.bucket.trained)

    def whole(self) -> Tensor:
        """All weights of the span, flat (N,); their gradient goes to `add`."""
        return _Whole.apply(self.anchor, self) if self.bucket.trained else self.gather()  # type: ignore[no-untyped-call]

    def gather(self) -> Tensor:
        whole = self.mine.new_empty(self.numel)
        parts = [whole[start:stop] for start, stop in self.ranges]
        parts[self.axis.rank].copy_(self.mine)
        wait(self.axis.gather_in_place(parts))
        return whole

    def add(self, grad: Tensor) -> None:
        """Add this micro-batch's gradient (N,), summed over tp where ranks saw parts, and over the replicas."""
        assert self._sums is not None
        grad = grad.to(self._sums.dtype)
        sum_over_tp(self.tp, self.partial, self.views(grad))
        received, works = self.axis.exchange([grad[start:stop] for start, stop in self.ranges])
        wait(works)
        self._sums.add_(fold(received))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = zip(self.tensors, self.shapes, flat.split(self.sizes), strict=True)
        return {tensor.name: part.view(shape) for tensor, shape, part in parts}

    def _inside(self, start: int, stop: int) -> tuple[int, int]:
        """Elements [start, stop) of the bucket, as far as they are in the span, counted from its beginning."""
        low = min(max(start - self.first, 0), self.numel)
        return low, max(low, min(stop - self.first, self.numel))

    def _own(self, flat: Tensor) -> Tensor:
        """The span's part of something that is cut as this rank's slice of the bucket is: (n,)."""
        start, stop = self.ranges[self.axis.rank]
        skip = self.first + start - self.bucket.slice[0]
        return flat[skip : skip + stop - start] if stop > start else flat[:0]


class _Whole(torch.autograd.Function):
    """Gathers a span; on the way back its gradient is reduced where it belongs, outside of autograd."""

    @staticmethod
    def forward(ctx, anchor: Tensor, span: Span) -> Tensor:  # type: ignore[no-untyped-def, override]
        ctx.span = span
        return span.gather()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, None]:  # type: ignore[no-untyped-def, override]
        ctx.span.add(grad.contiguous())
        return None, None


class _Handle(NamedTuple):
    """Where a weight that backward will ask for is found in its gathered span."""

    span: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class Opened:
    """The one use whose weights stand gathered for backward."""

    use: Use | None = None
    wholes: dict[int, Tensor] = field(default_factory=dict)

    def whole(self, use: Use, span: int) -> Tensor:
        if self.use is not use:
            self.close()
            self.use = use
        if span not in self.wholes:
            self.wholes[span] = use.spans[span].gather()
        return self.wholes[span]

    def close(self) -> None:
        self.use, self.wholes = None, {}


class Use:
    """Weights that `module` reads at once. `opened` is shared by all uses of a rank."""

    def __init__(self, module: nn.Module, spans: Sequence[Span], opened: Opened) -> None:
        self.spans, self._opened = tuple(spans), opened
        self._slots = {t.name: _slot(module, t) for span in spans for t in span.tensors}
        self._wholes: list[Tensor] = []

    def during(self, function: Callable[..., Tensor], *inputs: object, again: bool = True) -> Tensor:
        """`function(*inputs)` with the weights in place. `again`: backward gathers them by itself; not where the whole
        call is repeated in backward."""
        self._opened.close()
        self._wholes = [span.whole() for span in self.spans]
        try:
            for span, whole in zip(self.spans, self._wholes, strict=True):
                for name, view in span.views(whole).items():
                    setattr(*self._slots[name], view)
            with saved_tensors_hooks(self._pack, self._unpack) if again else nullcontext():
                return function(*inputs)
        finally:
            for slot in self._slots.values():
                setattr(*slot, None)
            self._wholes = []

    def _pack(self, saved: Tensor) -> Tensor | _Handle:
        for number, whole in enumerate(self._wholes):
            if saved.numel() and saved.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
                return _Handle(number, saved.shape, saved.stride(), int(saved.storage_offset()))
        return saved

    def _unpack(self, saved: Tensor | _Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return self._opened.whole(self, saved.span).as_strided(saved.shape, saved.stride, saved.offset)


def _slot(module: nn.Module, tensor: LogicalTensor) -> tuple[nn.Module, str]:
    """Holder and attribute of a tensor, made a plain attribute: what comes and goes is no `nn.Parameter`."""
    name, _, leaf = tensor.name.rpartition(".")
    holder = module.get_submodule(name)
    if leaf in holder._parameters:
        delattr(holder, leaf)
    setattr(holder, leaf, None)
    return holder, leaf


class Slices:
    """All buckets of a rank under ZeRO 3; makes the uses of its model and binds the live slices to them."""

    def __init__(self, buckets: Sequence[Bucket], replicas: Replicas, gradients: SlicedGradients) -> None:
        self.buckets, self.replicas, self.gradients = buckets, replicas, gradients
        self.opened = Opened()
        self._spans: list[Span] = []

    def use(self, module: nn.Module, wanted: Callable[[LogicalTensor], bool]) -> Use:
        """The use of the tensors that `wanted` picks, all of them parameters of `module`."""
        spans = list(self._spans_of(wanted))
        self._spans += spans
        return Use(module, spans, self.opened)

    def bind(self, buffers: Mapping[str, Tensor]) -> None:
        for span in self._spans:
            span.bind(buffers[f"weight/{span.bucket.name}"])

    def _spans_of(self, wanted: Callable[[LogicalTensor], bool]) -> Iterator[Span]:
        for bucket in self.buckets:
            if names := {tensor.name for tensor in bucket.tensors if wanted(tensor)}:
                yield Span(bucket, names, self.replicas.of(bucket), self.gradients)
