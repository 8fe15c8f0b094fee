"""A mixture of experts on one rank: routing, the exchange of tokens over the ep axis, and the experts' products.

Shapes: B = batch, L = sequence, l = the positions that a rank holds outside of a tensor-parallel region (L or a part),
D = hidden, E = experts of the model, K = experts per token, n = experts on this rank, T = B x L tokens, R = T x K rows.

No expert has a capacity: every token reaches its K experts however many others want the same ones, so what a token
gets does not depend on which tokens share its batch, its rank or its micro-batch. Routing happens outside of the
region, once per position; the tp ranks of a region then send the same rows to their own part of each expert.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suika.core.model import ModelSpec
from suika.train.axis import Axis
from suika.train.blocks import Block, Mlp, Weights
from suika.train.parallel import Parallel

_GRID = 2.0**-16  # scores that round to the same multiple are ties


class MixtureBlock(Block):
    """A block whose MLP is a mixture. Each rank of the ep axis holds `E / ep` experts, whole or their tp part."""

    def add_mlp(self, model: ModelSpec) -> None:
        parallel = self.parallel
        self.router = Router(model, parallel)
        each = model.experts // parallel.ep.size
        held = range(parallel.ep.rank * each, (parallel.ep.rank + 1) * each)
        self.experts = Experts({str(e): Mlp(model, parallel.tp) for e in held}, parallel.ep)
        self.shared_experts = nn.ModuleDict({str(s): Mlp(model, parallel.tp) for s in range(model.shared_experts)})

    def feed_forward(self, x: Tensor) -> Tensor:
        """(B, l, D) -> (B, l, D)."""
        gates, chosen = self.router(x)
        tp, shared = self.parallel.tp, cast("list[Mlp]", list(self.shared_experts.values()))
        x, gates = tp.enter(x), tp.enter(gates)
        y = self.experts(x, gates, tp.whole(chosen))
        for expert in shared:
            y = y + expert.partial(x)
        y = tp.leave(y)
        for expert in shared:
            y = y if expert.down.bias is None else y + expert.down.bias
        return y


class Router(Weights):
    """Which K experts each token goes to, and how much each counts.

    Gates are the softmax over all experts, normalised over the chosen ones. The balancing loss (arXiv 2412.19437,
    equations 17 to 20, with softmax scores) is taken over each *sequence*, so that no layout changes it:
    `balance x E / (K L) x sum over experts (tokens that chose it x mean probability)`, weighed with the sequence's L
    tokens in the sum of losses. Its gradient needs no more than the counts; it is added on the way back.
    """

    def __init__(self, model: ModelSpec, parallel: Parallel) -> None:
        super().__init__()
        self.num_experts, self.per_token, self.parallel = model.experts, model.experts_per_token, parallel
        self.balance = model.balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, l, D) -> gates (B, l, K) and experts (B, l, K), best first."""
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(wide), self.weight.to(wide))
        chosen = choose(logits.detach(), self.per_token)
        probabilities = logits.softmax(-1)
        if self.balance:
            probabilities = _Pulled.apply(probabilities, self.balance * self._popularity(chosen, wide))  # type: ignore[no-untyped-call]
        gates = probabilities.gather(-1, chosen)
        return (gates / gates.sum(-1, keepdim=True)).to(x.dtype), chosen

    def _popularity(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """How often each whole sequence chose each expert, against an even choice: (B, 1, E), mean 1."""
        picks = chosen.flatten(1)
        counts = torch.zeros((len(picks), self.num_experts), dtype=dtype, device=chosen.device)
        counts.scatter_add_(1, picks, torch.ones_like(picks, dtype=dtype))
        counts = self.parallel.sum_over_sequence(counts)
        return (counts / counts.sum(1, keepdim=True) * self.num_experts).unsqueeze(1)


def choose(scores: Tensor, num: int) -> Tensor:
    """The `num` best of (..., E), best first. Ties go to the lower number, also ties that another layout's rounding
    would break: scores are compared on a grid."""
    coarse = (scores / _GRID).round()
    return coarse.sort(dim=-1, descending=True, stable=True).indices[..., :num]


class _Pulled(torch.autograd.Function):
    """Passes probabilities on; adds the gradient of the balancing loss on the way back."""

    @staticmethod
    def forward(ctx: Any, probabilities: Tensor, pull: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(pull)
        return probabilities.view_as(probabilities)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad + ctx.saved_tensors[0], None


class Experts(nn.ModuleDict):
    """This rank's routed experts, by global number, and the way of the tokens to all experts and back."""

    def __init__(self, experts: dict[str, Mlp], ep: Axis) -> None:
        super().__init__(experts)
        self.ep = ep

    def forward(self, x: Tensor, gates: Tensor, chosen: Tensor) -> Tensor:
        """(B, L, D), gates and experts (B, L, K) -> this tp rank's part of the gated sums (B, L, D)."""
        (B, L, D), K = x.shape, chosen.shape[-1]
        by_expert = chosen.flatten().sort(stable=True).indices  # row -> place in (T, K): experts, then tokens, in order
        rows = _Reordered.apply(x.view(B * L, 1, D).expand(-1, K, -1).reshape(-1, D), by_expert)  # type: ignore[no-untyped-call]
        sent = chosen.flatten().bincount(minlength=len(self) * self.ep.size).view(self.ep.size, len(self))
        arrived = self.ep.swap(sent)  # (ep, n): rows from each rank for each expert here
        leaving, coming = sent.sum(1).tolist(), arrived.sum(1).tolist()
        rows = _Traded.apply(rows, leaving, coming, self.ep)  # type: ignore[no-untyped-call]
        rows = _Traded.apply(self._compute(rows, arrived), coming, leaving, self.ep)  # type: ignore[no-untyped-call]
        rows = _Reordered.apply(rows, by_expert.argsort())  # type: ignore[no-untyped-call]
        return (rows.view(B, L, K, D) * gates.unsqueeze(-1)).sum(2)

    def _compute(self, rows: Tensor, arrived: Tensor) -> Tensor:
        """Each expert to its rows. They come by rank, then expert, and leave in the same order."""
        numbers = torch.arange(len(self)).repeat(self.ep.size).repeat_interleave(arrived.flatten().cpu())
        order = numbers.sort(stable=True).indices.to(rows.device)
        rows = _Reordered.apply(rows, order)  # type: ignore[no-untyped-call]
        parts = rows.split(arrived.sum(0).tolist())
        outputs = [expert.routed(part) for expert, part in zip(self.values(), parts, strict=True)]  # type: ignore[operator]
        return _Reordered.apply(torch.cat(outputs), order.argsort())  # type: ignore[no-any-return, no-untyped-call]


class _Reordered(torch.autograd.Function):
    """Rows in another order. Its backward is a permutation too: nothing is added, so no bit depends on an order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad[ctx.saved_tensors[0].argsort()], None


class _Traded(torch.autograd.Function):
    """Rows sent to their experts' ranks (or back); gradients take the opposite way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, leaving: list[int], coming: list[int], ep: Axis) -> Tensor:  # type: ignore[override]
        ctx.way = leaving, coming, ep
        return ep.trade(rows, leaving, coming)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        leaving, coming, ep = ctx.way
        return ep.trade(grad, coming, leaving), None, None, None
