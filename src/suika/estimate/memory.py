"""Peak bytes of a rank, part by part. Activations as in Korthikanti et al. (arXiv 2205.05198), state as in ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from suika.estimate.columns import Array
from suika.estimate.grid import Grid
from suika.estimate.step import layer_parameters

GB = 1e9
CONTEXT_BYTES = 0.7 * GB  # CUDA context, libraries and workspaces that a framework's own count leaves out
COMMUNICATOR_BYTES = 0.3 * GB  # buffers of one NCCL communicator; users report up to 0.7 GB
UPDATE_BYTES = 0.4 * GB  # workspaces of the libraries and of the optimizer's update
FRAGMENTATION = 0.04  # of what the allocator holds
SPREAD = 0.06  # standard deviation of log(peak / predicted), for the p90


@dataclass(frozen=True)
class Memory:
    """`stages[s]`: peak bytes of first, fullest middle and last stage; `parts` are those of the worst of the three."""

    stages: Mapping[str, Array]
    parts: Mapping[str, Array]
    allocated: Array  # worst stage, as the framework's allocator counts it
    peak: Array  # worst stage, as the driver counts it

    @property
    def p90(self) -> Array:
        return self.peak * np.exp(1.2816 * SPREAD)


def memory(g: Grid) -> Memory:
    rows = {
        "first": _stage(g, g.first, np.ones(()), np.where(g.pp == 1, 1.0, 0.0), in_flight(g, 0)),
        "middle": _stage(g, g.middle, np.zeros(()), np.zeros(()), in_flight(g, 1)),
        "last": _stage(g, g.last, np.where(g.pp == 1, 1.0, 0.0), np.ones(()), in_flight(g, -1)),
    }
    exists = {"first": g.pp >= 1, "middle": g.pp > 2, "last": g.pp > 1}
    sums = {s: np.where(exists[s], sum(parts.values()), 0.0) for s, parts in rows.items()}
    order = np.argmax(np.stack(np.broadcast_arrays(*sums.values())), axis=0)
    parts = {name: np.choose(order, np.broadcast_arrays(*(rows[s][name] for s in rows))) for name in rows["first"]}
    allocated = sum(parts.values())
    onc = _overhead(g)
    parts = parts | {"fragmentation": FRAGMENTATION * allocated} | onc
    peak = sum(parts.values())
    extra = sum(onc.values())
    stages = {s: np.where(exists[s], (1 + FRAGMENTATION) * value + extra, 0.0) for s, value in sums.items()}
    return Memory(stages, parts, np.asarray(allocated), np.asarray(peak))


def in_flight(g: Grid, stage: int) -> Array:
    """Micro-batches' worth of a stage's layers whose activations live at once (stage -1: the last)."""
    m = np.ceil(g.global_batch / (g.dp * g.micro_batch))
    depth = np.ones(()) * (1.0 if stage < 0 else 0.0) + (0.0 if stage < 0 else g.pp - stage)
    v = g.virtual_stages
    # Interleaved: warm-up holds (v - 1) x pp + 2 x (pp - 1 - stage) + 1 chunks of 1/v of the layers each.
    position = g.pp - 1 if stage < 0 else np.asarray(float(stage))
    chunks = ((v - 1) * g.pp + 2 * (g.pp - 1 - position) + 1) / v
    return np.where(v > 1, np.minimum(chunks, m), np.minimum(np.maximum(depth, 1), m))


def _stage(g: Grid, layers: Array, embedding: Array, head: Array, flying: Array) -> dict[str, Array]:
    """Bytes of one stage by part, without what every rank has in common."""
    e = g.element_bytes
    plain, routed = layer_parameters(g)
    table = g.vocab * g.hidden / g.tp
    shared = np.where((g.tied > 0) & (embedding * head > 0), 1.0, 0.0)
    plain = layers * plain + (embedding + head - shared) * table + embedding * g.positions * g.hidden
    routed = layers * routed
    group = g.dp * g.cp
    expert_group = np.maximum(group / g.ep, 1)

    def sharded(bytes_each: Array | float, stage: int) -> Array:
        on = g.zero >= stage
        return bytes_each * (plain / np.where(on, group, 1) + routed / np.where(on, expert_group, 1))

    full_precision = e >= 4
    layer_p = sum(layer_parameters(g))
    tokens = g.micro_batch * g.sequence / g.cp
    per_layer = layer_activations(g, tokens)
    kept = np.where(g.recompute == 2, e * tokens * g.hidden / _sp(g), per_layer)
    live = np.where(g.recompute == 2, per_layer, 0.0)
    logits = head * tokens * g.vocab / g.tp * np.where(g.fused_loss > 0, 6.0, 10.0)
    # ZeRO-3 gathers two layers at a time; not while the logits stand, whose place they take.
    gathered = np.maximum(2 * layer_p * e - logits, 0.0)
    return {
        "weights": sharded(e, 3),
        "gradients": sharded(np.where(full_precision, e, g.grad_bytes) * g.trained, 2),
        "optimizer": sharded(np.where(full_precision, 2 * e, 12.0) * g.trained, 1),
        "activations": kept * layers * flying + live,
        "logits": logits,
        "temporary": np.where(g.zero >= 3, gathered, 3 * e * g.hidden * g.ffn / g.tp),
        "update": UPDATE_BYTES * np.where(g.memory_bytes > 8 * GB, 1.0, 0.0),
    }


def layer_activations(g: Grid, tokens: Array) -> Array:
    """Bytes that the backward pass of one layer needs, without recompute (selective drops the scores)."""
    e = g.element_bytes
    moe = np.where(g.experts > 0, (g.layers - g.dense_layers) / g.layers, 0.0)
    width = (1 - moe) * g.ffn + moe * g.expert_ffn * (g.experts_per_token + g.shared_experts)
    outer = 4 * e * g.hidden + 2 * g.dropout * g.hidden
    routed = moe * 2 * e * g.hidden * g.experts_per_token
    inner = e * (g.q_width + 2 * g.kv_width + g.hidden + width * (2 + g.gated)) / g.tp
    outer = outer + g.loose_activations * 6 * e * g.hidden
    inner = inner + g.loose_activations * e * (g.q_width + g.kv_width + g.gated * width) / g.tp
    scores = np.where((g.unfused > 0) & (g.recompute == 0), 2.5 * e * g.heads * g.sequence / g.tp / g.cp, 0.0)
    return tokens * (outer / _sp(g) + routed + inner + scores)


def _overhead(g: Grid) -> dict[str, Array]:
    groups = sum(np.where(axis > 1, 1.0, 0.0) for axis in (g.tp, g.pp, g.dp, g.cp, g.ep)) + 1
    big = np.where(g.memory_bytes > 8 * GB, 1.0, 0.0)  # a CPU process has no device context
    return {"communicators": groups * COMMUNICATOR_BYTES * big, "context": CONTEXT_BYTES * big}


def _sp(g: Grid) -> Array:
    return np.where(g.sequence_parallel > 0, g.tp, 1.0)
