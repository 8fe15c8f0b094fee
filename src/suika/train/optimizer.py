"""AdamW on the ZeRO slices of a rank, and the learning rate as a pure function of the step.

Only operations with one rounding (add, multiply, divide, square root) are used: vectorised loops and their scalar
tails then agree to the last bit, so copies of a parameter that lie at different offsets stay equal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from suika.core.job import OptimizerSpec
from suika.reshard.state import Bucket
from suika.train.axis import Replicas, wait


def learning_rate(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (0 is the first) of a job of `num_steps`."""
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.decay == "constant":
        return spec.lr
    end = spec.decay_steps or num_steps
    done = min(1.0, (step - spec.warmup_steps) / max(1, end - spec.warmup_steps))
    shape = 1.0 - done if spec.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * shape)


class BucketState:
    """Moments of one bucket's slice and the pieces of the weights that it updates, as views of the bound buffers.

    With masters (bf16) the update goes to the master and the weights are its rounding.
    """

    def __init__(self, bucket: Bucket, buffers: Mapping[str, Tensor]) -> None:
        self.bucket = bucket
        self.m, self.v = buffers[f"m/{bucket.name}"], buffers[f"v/{bucket.name}"]
        start, stop = bucket.slice
        ends = [at + math.prod(shape) for at, shape in zip(bucket.offsets, bucket.shapes, strict=True)]
        # Of each shard, what lies in this slice; tensors of which nothing does are left out.
        cut = [
            (tensor, max(start - at, 0), min(stop, end) - at)
            for tensor, at, end in zip(bucket.tensors, bucket.offsets, ends, strict=True)
            if max(start, at) < min(stop, end)
        ]
        self.sizes = [high - low for _, low, high in cut]
        weights = {t.name: buffers[f"weight/{t.name}"].view(-1) for t in bucket.tensors if not bucket.gathered}
        self.weights = list(weights.values())  # whole ones; none where weights are slices, too
        # This slice, as the model reads it.
        self.rounded = [weights[tensor.name][low:high] for tensor, low, high in cut if not bucket.gathered]
        if bucket.gathered and cut:
            self.rounded = list(buffers[f"weight/{bucket.name}"].split(self.sizes))
        master = buffers.get(f"master/{bucket.name}")
        self.exact = self.rounded if master is None else list(master.split(self.sizes)) if cut else []
        self.decayed = [exact for (tensor, *_), exact in zip(cut, self.exact, strict=True) if tensor.decay]

    @torch.no_grad()
    def update(self, grad: Tensor, spec: OptimizerSpec, step: int, lr: float) -> None:
        """AdamW (arXiv 1711.05101) with the scaled gradient of this slice; `step` counts from 1. Consumes `grad`."""
        if not self.exact:
            return
        beta1, beta2 = spec.betas
        scratch = grad * (1 - beta1)
        self.m.mul_(beta1).add_(scratch)
        torch.mul(grad, grad, out=scratch).mul_(1 - beta2)
        self.v.mul_(beta2).add_(scratch)
        torch.div(self.v, 1 - beta2**step, out=scratch).sqrt_().add_(spec.eps)
        torch.div(self.m, scratch, out=grad).mul_(lr / (1 - beta1**step))
        if spec.weight_decay and self.decayed:
            torch._foreach_mul_(self.decayed, 1 - lr * spec.weight_decay)
        torch._foreach_sub_(self.exact, grad.split(self.sizes))
        if self.exact is not self.rounded:
            torch._foreach_copy_(self.rounded, self.exact)

    @torch.no_grad()
    def pack(self, flat: Tensor) -> None:
        """Write the updated slice into its place in the bucket's flat vector."""
        start, stop = self.bucket.slice
        if self.rounded:
            torch.cat(self.rounded, out=flat[start:stop])

    @torch.no_grad()
    def unpack(self, flat: Tensor) -> None:
        """Take all weights from the bucket's flat vector."""
        torch._foreach_copy_(self.weights, flat.split([len(w) for w in self.weights]))


class AdamW:
    """The optimizer of a rank: one `BucketState` per ZeRO bucket."""

    def __init__(self, spec: OptimizerSpec, buckets: tuple[Bucket, ...], buffers: Mapping[str, Tensor]) -> None:
        self.spec = spec
        self.states = tuple(BucketState(bucket, buffers) for bucket in buckets)

    def update(self, grads: list[Tensor], step: int, lr: float) -> None:
        """Update every slice with its gradient; `grads` are consumed. `step` counts from 1."""
        for state, grad in zip(self.states, grads, strict=True):
            state.update(grad, self.spec, step, lr)

    def share(self, flats: list[Tensor], replicas: Replicas) -> None:
        """Give every replica the slices that the others updated, where it holds whole weights. `flats` are scratch, at
        least as long and as wide as each bucket's weights."""
        split = [
            (state, flat.view(state.weights[0].dtype)[: state.bucket.numel])
            for state, flat in zip(self.states, flats, strict=True)
            if state.weights and state.bucket.sharded and state.bucket.replicas > 1
        ]
        rounds = []
        for state, flat in split:
            state.pack(flat)
            axis = replicas.of(state.bucket)
            slices = [state.bucket.slice_of(r) for r in range(axis.size)]
            rounds.append(axis.gather_in_place([flat[start:stop] for start, stop in slices]))
        for (state, flat), works in zip(split, rounds, strict=True):
            wait(works)
            state.unpack(flat)
