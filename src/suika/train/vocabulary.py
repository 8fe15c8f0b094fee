"""Embedding and cross-entropy over a vocabulary cut by rows over the tp axis. Shards may be uneven or empty.

Shapes: B = batch, L = sequence, N = B x L tokens, D = hidden, V = local rows of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suika.train.axis import Axis, fold

IGNORED = -1  # target of a position that does not count


def embed(ids: Tensor, weight: Tensor, first_row: int, tp: Axis) -> Tensor:
    """This rank's part of the embedding of `ids` (B, L) -> (B, L, D): zero where another rank holds the row."""
    if tp.group is None:
        return F.embedding(ids, weight)
    local = ids - first_row
    mine = (local >= 0) & (local < len(weight))
    rows = weight if len(weight) else weight.new_zeros(1, weight.shape[1])
    return F.embedding(local.where(mine, 0), rows) * mine.unsqueeze(-1)


class _CrossEntropy(torch.autograd.Function):
    """log sum exp(logits) - logit of the target, over all shards: each rank sends its own maximum, sum and picked logit
    once, and all combine them in rank order."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first_row: int, tp: Axis) -> Tensor:  # type: ignore[override]
        N, V = logits.shape
        local = targets - first_row
        rows = ((local >= 0) & (local < V)).nonzero().squeeze(-1)
        columns = local[rows]
        parts = logits.new_zeros(3, N)
        parts[0] = logits.amax(-1) if V else -torch.inf
        parts[1] = (logits - parts[0].unsqueeze(-1)).exp_().sum(-1)
        parts[2, rows] = logits[rows, columns]
        tops, sums, picked = tp.gather(parts).unbind(1)  # each (tp, N)
        top = tops.amax(0)
        log_total = fold((sums * (tops - top).exp()).unbind()).log() + top
        counted = targets != IGNORED
        ctx.save_for_backward(logits, log_total, rows, columns, counted)
        return torch.where(counted, log_total - fold(picked.unbind()), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits, log_total, rows, columns, counted = ctx.saved_tensors
        out = (logits - log_total.unsqueeze(-1)).exp_().mul_((grad * counted).unsqueeze(-1))
        out[rows, columns] -= grad[rows]
        return out, None, None, None


def token_losses(logits: Tensor, targets: Tensor, first_row: int, tp: Axis) -> Tensor:
    """Cross-entropy of each token: local logits (B, L, V), targets (B, L) -> (N,), zero where IGNORED.

    Computed in at least fp32; the same on every tp rank.
    """
    flat = logits.flatten(0, 1)
    if flat.dtype in (torch.bfloat16, torch.float16):
        flat = flat.float()
    return _CrossEntropy.apply(flat, targets.flatten(), first_row, tp)  # type: ignore[no-untyped-call]
