"""A transformer block of both families on one tensor-parallel rank, over plain parameters.

Shapes: B = batch, L = this rank's part of a sequence (all of it unless cp cuts it), D = hidden, H = local query heads,
K = local key/value heads, d = head_dim, F = local ffn columns. Column-parallel weights (q, k, v, gate, up) hold rows of
the logical tensor, row-parallel ones (o, down) columns; biases after a row-parallel product are whole and are added
once, outside of the region. Of adapters A (rank, in) and B (out, rank) one is cut as its matrix is, the other is whole;
both work inside the region.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from suika.core.layout import Recompute
from suika.core.model import ModelSpec
from suika.train.axis import Axis, TensorParallel
from suika.train.context import attend
from suika.train.masks import Masks
from suika.train.parallel import Parallel
from suika.train.sharded import Use


class Weights(nn.Module):
    """A weight and, where the family has one, a bias. Holds, does not compute."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)


class Linear(Weights):
    """A matrix of a layer and, where the model has some, its adapters. Does not add the bias by itself."""

    lora_a: Tensor | None
    lora_b: Tensor | None

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.scale = model.lora.scale if model.lora else 0.0

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def recomputed(function: Callable[..., Tensor], *inputs: object) -> Tensor:
    """Run `function` without keeping what it saves for backward: it runs again then. Touches no global RNG."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")


class Norm(Weights):
    """LayerNorm (gpt) or RMSNorm (llama)."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.layer_norm = model.family == "gpt"
        self.eps = model.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        if self.layer_norm:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)


def rotary_tables(length: int, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, each (L, d), in fp32 or wider; halves are rotated as in Llama.

    Source: RoFormer (arXiv 2104.09864).
    """
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    sin = angles.sin()
    sin[:, : head_dim // 2].neg_()  # the rotated halves are (-x2, x1): the sign lives in the table
    return angles.cos().to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions on (B, heads, L, d)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class Attention(nn.Module):
    """Causal attention; with fewer query than key/value heads' copies (GQA), each key/value head serves H/K queries."""

    def __init__(self, model: ModelSpec, parallel: Parallel, recompute: Recompute) -> None:
        super().__init__()
        self.tp, self.cp = parallel.tp, parallel.cp
        self.head_dim, self.recompute_core = model.head_dim, recompute == "selective"
        self.q, self.k, self.v, self.o = Linear(model), Linear(model), Linear(model), Linear(model)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = self.tp.enter(x)
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (p(x, p.bias).view(heads).transpose(1, 2) for p in (self.q, self.k, self.v))
        tables = () if rotary is None else rotary
        inputs = self.cp, q, k, v, *tables
        attended = recomputed(_attend, *inputs) if self.recompute_core else _attend(*inputs)
        y = self.tp.leave(self.o(attended))
        return y if self.o.bias is None else y + self.o.bias


def _attend(cp: Axis, q: Tensor, k: Tensor, v: Tensor, *rotary: Tensor) -> Tensor:
    """(B, H, L, d), (B, K, L, d), (B, K, L, d) -> (B, L, H d)."""
    if rotary:
        q, k = rotate(q, *rotary), rotate(k, *rotary)
    return attend(q, k, v, cp).transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    """gpt: down(gelu(up x)); llama: down(silu(gate x) * up x)."""

    def __init__(self, model: ModelSpec, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.gated = tp, model.gated
        if self.gated:
            self.gate = Linear(model)
        self.up, self.down = Linear(model), Linear(model)

    def forward(self, x: Tensor) -> Tensor:
        y = self.tp.leave(self.partial(self.tp.enter(x)))
        return y if self.down.bias is None else y + self.down.bias

    def partial(self, x: Tensor) -> Tensor:
        """Inside of a tensor-parallel region: this rank's part of the output, without the last bias."""
        up = self.up(x, self.up.bias)
        if self.gated:
            return self.down(F.silu(self.gate(x)) * up)
        return self.down(F.gelu(up, approximate="tanh"))

    def routed(self, rows: Tensor) -> Tensor:
        """As an expert, inside of a region: `partial` of (R, D), and the last bias from the first tp rank alone."""
        y = self.partial(rows)
        return y if self.down.bias is None or self.tp.axis.rank else y + self.down.bias


class Block(nn.Module):
    """Pre-norm residual block number `layer` of the model, with dropout at the end of each branch."""

    def __init__(self, model: ModelSpec, layer: int, parallel: Parallel, recompute: Recompute) -> None:
        super().__init__()
        self.name, self.recompute_all, self.parallel = f"layers.{layer}", recompute == "full", parallel
        self.attention_norm, self.attention = Norm(model), Attention(model, parallel, recompute)
        self.mlp_norm = Norm(model)
        self.add_mlp(model)
        self.use: Use | None = None  # ZeRO 3: its weights come and go

    def add_mlp(self, model: ModelSpec) -> None:
        self.mlp = Mlp(model, self.parallel.tp)

    def feed_forward(self, x: Tensor) -> Tensor:
        """The MLP, or what stands in its place: outside of a tensor-parallel region on both sides."""
        return self.mlp(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, masks: Masks) -> Tensor:
        run = self._run
        if self.use is not None:
            run = partial(self.use.during, self._run, again=not self.recompute_all)
        return recomputed(run, x, rotary, masks) if self.recompute_all else run(x, rotary, masks)

    def _run(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, masks: Masks) -> Tensor:
        x = x + masks.drop(self.attention(self.attention_norm(x), rotary), f"{self.name}.attention")
        return x + masks.drop(self.feed_forward(self.mlp_norm(x)), f"{self.name}.mlp")
