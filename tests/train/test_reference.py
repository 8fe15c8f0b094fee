"""The one-process run against textbook PyTorch: explicit formulas, torch's own AdamW and cross-entropy."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from twins import gpt, job, llama, moe, plan_of, text, twin

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.tensors import logical_tensors
from suika.runtime.program import RankGroups
from suika.train.optimizer import learning_rate
from suika.train.program import build

Parameters = dict[str, Tensor]


def norm(model: ModelSpec, p: Parameters, name: str, x: Tensor) -> Tensor:
    if model.family == "gpt":
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt()
        return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]
    return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * p[f"{name}.weight"]


def linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def rotated(model: ModelSpec, x: Tensor) -> Tensor:
    """(B, heads, L, d): pairs (i, i + d/2) turn by position x theta^(-2i/d), as complex numbers."""
    half = model.head_dim // 2
    angles = torch.outer(torch.arange(x.shape[2]).double(), model.rope_theta ** (-torch.arange(half).double() / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], -1)


def attention(model: ModelSpec, p: Parameters, name: str, x: Tensor) -> Tensor:
    B, L, _ = x.shape
    q, k, v = (linear(p, f"{name}.{part}", x).view(B, L, -1, model.head_dim).transpose(1, 2) for part in "qkv")
    if model.family == "llama":
        q, k = rotated(model, q), rotated(model, k)
    k, v = (t.repeat_interleave(model.heads // model.kv_heads, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(model.head_dim)
    scores = scores.masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    return linear(p, f"{name}.o", (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, L, -1))


def mlp(model: ModelSpec, p: Parameters, name: str, x: Tensor) -> Tensor:
    up = linear(p, f"{name}.up", x)
    if model.family == "llama":
        gate = linear(p, f"{name}.gate", x)
        return linear(p, f"{name}.down", gate * torch.sigmoid(gate) * up)
    return linear(p, f"{name}.down", 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3))))


def mixture(model: ModelSpec, p: Parameters, layer: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Every expert on every token, weighed with zero where it was not chosen; and the balancing loss, per sequence."""
    scores = (x @ p[f"{layer}.router.weight"].T).softmax(-1)
    best = scores.topk(model.experts_per_token).indices
    chosen = F.one_hot(best, model.experts).sum(-2)  # (B, L, E)
    gates = scores * chosen / (scores * chosen).sum(-1, keepdim=True)
    y = sum(gates[..., e : e + 1] * mlp(model, p, f"{layer}.experts.{e}", x) for e in range(model.experts))
    y = y + sum(mlp(model, p, f"{layer}.shared_experts.{s}", x) for s in range(model.shared_experts))
    share = chosen.double().mean(1) * model.experts / model.experts_per_token  # 1 where all are equally busy
    return y, (share * scores.mean(1)).sum(-1).mean()


def logits(model: ModelSpec, p: Parameters, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what is added to the loss before backward."""
    extra = torch.zeros((), dtype=torch.float64)
    x = p["embedding.weight"][ids]
    if model.family == "gpt":
        x = x + p["positions.weight"][: ids.shape[1]]
    for i in range(model.layers):
        x = x + attention(model, p, f"layers.{i}.attention", norm(model, p, f"layers.{i}.attention_norm", x))
        inner = norm(model, p, f"layers.{i}.mlp_norm", x)
        if model.is_moe_layer(i):
            y, balance = mixture(model, p, f"layers.{i}", inner)
            x, extra = x + y, extra + model.balance * balance
        else:
            x = x + mlp(model, p, f"layers.{i}.mlp", inner)
    return norm(model, p, "final_norm", x) @ p["embedding.weight" if model.tied else "head.weight"].T, extra


@pytest.mark.parametrize(
    "model",
    [gpt(), gpt(tied=False), llama(), llama(tied=True, kv_heads=1, qkv_bias=True), moe(), moe(gpt)],
    ids=["gpt-tied", "gpt", "llama-gqa", "llama-tied-mqa", "moe-llama", "moe-gpt"],
)
def test_ten_steps_are_those_of_textbook_pytorch(model: ModelSpec) -> None:
    spec = job(model)
    program = build(spec, plan_of(Layout()), 0, RankGroups(None, None, None, None, None), text())
    fresh = program.initialise()
    tensors = logical_tensors(model, spec.sequence_length)
    p: Parameters = {t.name: fresh[f"weight/{t.name}"].requires_grad_() for t in tensors}
    settings = spec.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p[t.name] for t in tensors if t.decay], "weight_decay": settings.weight_decay},
            {"params": [p[t.name] for t in tensors if not t.decay], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
    )
    results = twin(spec)
    for step, result in enumerate(results):
        samples = torch.from_numpy(program.dataset.samples(step * spec.global_batch, (step + 1) * spec.global_batch))
        predicted, extra = logits(model, p, samples[:, :-1])
        loss = F.cross_entropy(predicted.flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        (loss + extra).backward()
        grads = [parameter.grad for parameter in p.values() if parameter.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(grads)
        for grad in grads:
            grad.mul_(min(1.0, settings.clip_norm / grad_norm.item()))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, spec.steps)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-10)
        assert result.grad_norm == pytest.approx(grad_norm.item(), abs=1e-10)
    assert results[-1].loss < results[0].loss - 0.4  # and it learns
