"""What one micro-batch costs a rank: rooflines of GEMMs, attention and element-wise work, and the host behind them.

T = tokens of a micro-batch on a rank (micro_batch x sequence / cp), h = hidden, f = ffn. Times in seconds per rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.estimate.columns import Array
from suika.estimate.grid import Grid

KERNEL_S = 3e-6  # start of a kernel that is already queued
VECTOR_KERNELS = 12  # element-wise kernels of a fused layer's forward pass
GEMM_BANDWIDTH = 0.65  # of the memory peak, reached by operands of a GEMM
TILE = 128  # rows and columns of a GEMM's output tile, rows of an attention kernel's
ATTENTION_WAVE = 1.5  # waves of tiles at which a fused attention kernel is 40 % efficient
UNALIGNED = 0.2  # of a product's time, for each halving of the pieces in which its rows can be loaded below 16 bytes


@dataclass(frozen=True)
class Pass:
    """Seconds of one direction through something, by op class."""

    gemm: Array
    attention: Array
    vector: Array

    @property
    def total(self) -> Array:
        return self.gemm + self.attention + self.vector

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.gemm + other.gemm, self.attention + other.attention, self.vector + other.vector)


@dataclass(frozen=True)
class Compute:
    """Per micro-batch: one layer (dense and mixture-of-experts), the embedding and the head, both directions."""

    tokens: Array
    forward: Pass
    backward: Pass
    moe_forward: Pass
    moe_backward: Pass
    embedding: Array
    head_forward: Array
    head_backward: Array


def gemm_s(g: Grid, m: Array, n: Array, k: Array, rate: Array) -> Array:
    """Time of an (m x k) by (k x n) product: compute and memory roofs joined smoothly; a core that computes does not
    fetch, so that an emulated device takes their sum.

    Short k (the prologue of a tile's pipeline) and few output tiles per unit (a last, half-empty wave) lower the rate.
    """
    tiles = np.maximum(np.ceil(m / TILE) * np.ceil(n / TILE), 1.0)
    waves = tiles / g.num_units
    compute = 2 * m * n * k / rate * (1 + g.gemm_k0 / np.maximum(k, 1)) * (1 + 0.5 * g.gemm_wave / waves)
    memory = g.element_bytes * (m * k + n * k + m * n) / (GEMM_BANDWIDTH * g.memory_bytes_per_s)
    both = np.where(g.emulated > 0, compute + memory, np.sqrt(np.sqrt(compute**4 + memory**4)))
    return both + KERNEL_S


def _linear(g: Grid, m: Array, n: Array, k: Array, rate: Array) -> tuple[Array, Array]:
    """Forward and backward of a linear layer; a frozen one has no weight gradient."""
    forward = gemm_s(g, m, n, k, rate)
    backward = gemm_s(g, m, k, n, rate) + (1 - g.frozen) * gemm_s(g, n, k, m, rate)
    return forward, backward


def softmax_is_loose(g: Grid) -> Array:
    """Megatron's softmax kernel takes four (sequence, head) pairs to a block; otherwise scale, mask, cast and softmax
    each pass through memory (and each need a launch)."""
    return (g.unfused > 0) & ((g.micro_batch * g.heads / g.tp) % 4 > 0)


def _attention_core(g: Grid, tokens: Array) -> tuple[Array, Array]:
    """Scores, softmax and weighted values of one layer; causal halves the work of a fused kernel only."""
    width = g.q_width / g.tp
    s = g.sequence
    rate = g.peak * g.attention * s / (s + 400.0) * np.where(g.head_dim <= 64, 0.9, 1.0)
    # A fused kernel gives each unit tiles of queries of one head; few of them leave units idle.
    tiles = tokens * g.heads / g.tp / TILE / g.num_units
    fused = 2 * tokens * s * width / rate * (1 + ATTENTION_WAVE / np.maximum(tiles, 1e-9))
    # Unfused: whole square of scores through memory; bytes per score element: 13 forward, 19 backward.
    scores = tokens * s * g.heads / g.tp
    loose = np.where(softmax_is_loose(g), 2.5, 1.0)
    forward_bytes, backward_bytes = 13 * loose, 19 * loose
    through = 0.9 * g.memory_bytes_per_s / (g.element_bytes / 2)
    loose_forward = 4 * tokens * s * width / (g.peak * g.attention) + forward_bytes * scores / through
    loose_backward = 8 * tokens * s * width / (g.peak * g.attention) + backward_bytes * scores / through
    forward = np.where(g.unfused > 0, loose_forward, fused)
    less = 2.5 / 0.85 * 2 * tokens * s * width / rate * (1 + 0.4 * ATTENTION_WAVE / np.maximum(tiles, 1e-9))
    backward = np.where(g.unfused > 0, loose_backward, less)
    return forward, backward


def _vector(g: Grid, tokens: Array, ffn: Array) -> tuple[Array, Array]:
    """Norms, residuals, dropout (sharded by sequence parallelism) and activation, rotary and bias work (by tp)."""
    shard = np.where(g.sequence_parallel > 0, g.tp, 1.0)
    outer = (16 + 6 * g.dropout) * tokens * g.hidden / shard
    inner = tokens * (8 * (g.hidden + 2 * g.kv_width) + (4 + 2 * g.gated) * ffn) / g.tp
    cast = np.where((g.low > 0) & (g.low_gain > 1), (4 * g.hidden + 4 * (g.hidden + ffn) / g.tp) * tokens, 0.0)
    rate = g.vector * g.memory_bytes_per_s / (g.element_bytes / 2)
    forward = ((outer + inner) * g.vector_scale + cast) / rate
    starts = VECTOR_KERNELS * KERNEL_S * g.vector_scale
    return forward + starts, (1.8 - 0.5 * g.frozen) * forward + 1.5 * starts


def compute(g: Grid, log: dict[str, Array]) -> Compute:
    """All per-micro-batch times; `log` holds log factors of the op classes gemm, low, attention and vector."""
    tokens = g.micro_batch * g.sequence / g.cp
    wide = g.peak * g.gemm
    low = np.where(g.low > 0, g.low_gain / g.fp8_scale * np.exp(-log["low"]), 1.0)
    rate = wide * low

    def attention_block() -> tuple[Pass, Pass]:
        qkv = _linear(g, tokens, (g.q_width + 2 * g.kv_width) / g.tp, g.hidden, rate)
        out = _linear(g, tokens, g.hidden, g.q_width / g.tp, rate)
        core = _attention_core(g, tokens)
        zero = np.zeros(())
        return Pass(qkv[0] + out[0], core[0], zero), Pass(qkv[1] + out[1], core[1], zero)

    def mlp(width: Array, rows: Array) -> tuple[Array, Array]:
        up = _linear(g, rows, width * (1 + g.gated), g.hidden, rate)
        down = _linear(g, rows, g.hidden, width, rate)
        return up[0] + down[0], up[1] + down[1]

    def scaled(gemm: Array, core: Array, vector: Array) -> Pass:
        return Pass(gemm * np.exp(log["gemm"]), core * np.exp(log["attention"]), vector * np.exp(log["vector"]))

    block_f, block_b = attention_block()
    mlp_f, mlp_b = mlp(g.ffn / g.tp, tokens)
    vec_f, vec_b = _vector(g, tokens, g.ffn)
    forward = scaled(block_f.gemm + mlp_f, block_f.attention, vec_f)
    backward = scaled(block_b.gemm + mlp_b, block_b.attention, vec_b)
    moe_forward, moe_backward = forward, backward
    if np.any(g.experts > 0):
        # Balanced routing: a rank's experts see tokens x experts_per_token rows in groups of one expert each.
        experts = np.maximum(g.experts, 1)
        local = experts / g.ep
        rows = tokens * g.experts_per_token
        ex_f, ex_b = mlp(g.expert_ffn / g.tp, rows / local)
        sh_f, sh_b = mlp(g.expert_ffn / g.tp, tokens)
        routed = g.expert_ffn * (g.experts_per_token + g.shared_experts)
        vec_f, vec_b = _vector(g, tokens, routed)
        permute = 8 * rows * g.hidden / (g.vector * g.memory_bytes_per_s)
        moe_forward = scaled(block_f.gemm + ex_f * local + sh_f * g.shared_experts, block_f.attention, vec_f + permute)
        moe_backward = scaled(block_b.gemm + ex_b * local + sh_b * g.shared_experts, block_b.attention, vec_b + permute)
    head_f, head_b = _head(g, tokens, wide)
    bandwidth = g.vector * g.memory_bytes_per_s
    embedding = np.exp(log["vector"]) * 6 * g.element_bytes * tokens * g.hidden / bandwidth
    loss = np.exp(log["vector"]) * np.where(g.fused_loss > 0, 12.0, 24.0) * tokens * g.vocab / g.tp / bandwidth
    gemm = np.exp(log["gemm"])
    return Compute(
        tokens,
        forward,
        backward,
        moe_forward,
        moe_backward,
        embedding,
        head_f * gemm + loss / 2,
        head_b * gemm + loss / 2,
    )


def _head(g: Grid, tokens: Array, rate: Array) -> tuple[Array, Array]:
    """Logits: never in low precision; vocabulary split over tp. Rows of an unpadded vocabulary that are no whole pieces
    of 16 bytes are loaded in smaller ones, for which the product waits."""
    columns = g.vocab / g.tp
    loose = (g.pads_vocabulary == 0) & (g.emulated == 0)
    if np.any(loose):
        row_bytes = np.rint(columns) * g.element_bytes
        halvings = sum(row_bytes % size > 0 for size in (4, 8, 16))
        rate = rate / np.where(loose, 1.0 + UNALIGNED * halvings, 1.0)
    forward = gemm_s(g, tokens, columns, g.hidden, rate)
    backward = gemm_s(g, tokens, g.hidden, columns, rate) + (1 - g.frozen) * gemm_s(g, columns, g.hidden, tokens, rate)
    return forward, backward
