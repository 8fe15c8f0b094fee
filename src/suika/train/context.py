"""Context parallelism: a sequence is cut over the cp axis; attention gathers the keys and values of all of it.

Shapes: B = batch, L = sequence, n = size of the axis, l = L / n, h = l / 2, H = local query heads, K = local key/value
heads, d = head_dim.

Rank c of n holds blocks c and 2n - 1 - c of the sequence's 2n equal blocks, in this order: an early and a late one, so
that causal attention is the same work on every rank. Each position's attention is computed by one rank, over all of its
keys: nothing is approximated, and sums of gradients over the axis are made in rank order like all others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suika.train.axis import Axis


def blocks(cp: Axis, rank: int) -> tuple[int, int]:
    """The two blocks of `rank`, of 2 x size."""
    return rank, 2 * cp.size - 1 - rank


def context(cp: Axis, length: int) -> tuple[slice, ...]:
    """The positions of a sequence of `length` that this rank holds, in its order."""
    if cp.size == 1:
        return (slice(0, length),)
    h = length // (2 * cp.size)
    return tuple(slice(block * h, (block + 1) * h) for block in blocks(cp, cp.rank))


def attend(q: Tensor, k: Tensor, v: Tensor, cp: Axis) -> Tensor:
    """Causal attention of this rank's positions: (B, H, l, d), (B, K, l, d), (B, K, l, d) -> (B, H, l, d)."""
    grouped = q.shape[1] != k.shape[1]
    if cp.size == 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    keys, values = _Gathered.apply(torch.stack([k, v]), cp)  # type: ignore[no-untyped-call]
    attended = []
    for queries, block in zip(q.chunk(2, dim=-2), blocks(cp, cp.rank), strict=True):
        h = queries.shape[-2]
        seen = (block + 1) * h  # keys up to the block's last position
        mask = torch.ones(h, seen, dtype=torch.bool, device=q.device).tril(seen - h)
        attended.append(
            F.scaled_dot_product_attention(
                queries, keys[..., :seen, :], values[..., :seen, :], attn_mask=mask, enable_gqa=grouped
            )
        )
    return torch.cat(attended, dim=-2)


class _Gathered(torch.autograd.Function):
    """(..., l, d) of each rank -> (..., L, d) in the order of the sequence; gradients are summed and split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis) -> Tensor:  # type: ignore[override]
        ctx.cp = cp
        early, late = cp.gather(x.contiguous()).chunk(2, dim=-2)  # (n, ..., h, d) each
        return torch.cat([*early.unbind(), *reversed(late.unbind())], dim=-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        cp, parts = ctx.cp, grad.chunk(2 * ctx.cp.size, dim=-2)
        of_ranks = [torch.cat([parts[block] for block in blocks(cp, rank)], dim=-2) for rank in range(cp.size)]
        return cp.sum_and_split(torch.stack(of_ranks)), None
