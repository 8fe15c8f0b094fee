"""The price of an optimizer step: pipeline of stages, gradient sync that shows, optimizer; for N rows at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from suika.estimate import comm
from suika.estimate.columns import Array
from suika.estimate.compute import Compute, Pass, compute, softmax_is_loose
from suika.estimate.factors import OP_CLASSES
from suika.estimate.grid import Grid
from suika.estimate.pipeline import closed_form
from suika.estimate.shared_cores import load_s, shared_cores_s


@dataclass(frozen=True)
class Stage:
    """Seconds per micro-batch of one layer in one direction, as the slowest stage spends them."""

    busy: Array  # compute
    host: Array  # waiting for the host to launch
    tp: Array
    cp: Array
    ep: Array
    gather: Array  # FSDP traffic that compute does not hide

    @property
    def total(self) -> Array:
        return self.busy + self.host + self.tp + self.cp + self.ep + self.gather


@dataclass(frozen=True)
class Price:
    """`parts_s` (each (N,)) sum to `step_s`. The stage times feed the exact pipeline recurrence of a single layout."""

    step_s: Array
    parts_s: Mapping[str, Array]
    num_micro: Array
    layer_forward_s: Array
    layer_backward_s: Array
    embedding_s: Array
    head_forward_s: Array
    head_backward_s: Array
    hop_s: Array
    micro_batch_s: Array
    work_s: Array  # of all ranks together
    cores_s: Array  # that shared cores need for it if it lies on them evenly; 0: nothing is shared
    work_parts_s: Mapping[str, Array]  # of an average rank: compute, tp, cp, ep, dp, optimizer


DP_BUS = 1.3  # a gradient collective beside compute takes this many times as long as one alone


def soft_max(*times: Array) -> Array:
    """Overlap that is good but not perfect: the 3-norm of times that run side by side."""
    return np.cbrt(sum(t**3 for t in times))


def price(g: Grid, log: Mapping[str, Array | float] | None = None) -> Price:
    """Price every row of `g`; `log[c]` is added to the fitted log factor of op class c (absent: 0)."""
    factors = {c: getattr(g, f"log_{c}") + np.asarray((log or {}).get(c, 0.0)) for c in OP_CLASSES}
    scale = {c: np.exp(v) for c, v in factors.items()}
    work = compute(g, factors)
    forward, backward = _layers(g, work, scale)
    num_micro = np.ceil(g.global_batch / (g.dp * g.micro_batch))
    added = _accumulate_s(g, g.vocab * g.hidden / g.tp, scale)  # gradient of the embedding table, and of the head
    embedding = work.embedding + g.micro_batch_s * scale["host"] / 2 + added / 3  # a third of both directions
    head_backward = work.head_backward + added
    head = work.head_forward + head_backward
    hop = comm.hop_s(g, comm.pp_extent(g), g.element_bytes * work.tokens * g.hidden) * scale["p2p"]
    v = g.virtual_stages
    hidden_hops = np.where((v > 1) & (g.p2p_overlap > 0), 0.2, 1.0)
    exposed_hops = 2 * hop * v * hidden_hops
    per_layer = forward.total + backward.total
    fixed = exposed_hops + g.micro_batch_s * scale["host"]
    first = g.first * per_layer + 3 * embedding + fixed + np.where(g.pp == 1, head, 0.0)
    middle = np.where(g.pp > 2, g.middle * per_layer + fixed, 0.0)
    last = np.where(g.pp > 1, g.last * per_layer + head + fixed, 0.0)
    total = g.layers * per_layer + 3 * embedding + head + g.pp * fixed
    pipe = closed_form(first, middle, last, total, num_micro, v)
    slowest = np.maximum(np.maximum(first, middle), last)
    sync = _sync(g, scale, np.where(g.zero >= 3, 0.0, backward.total * g.first))
    update = _optimizer(g, scale)
    # Parts: what the slowest stage did, the bubble, and the end of the step.
    slow_layers = np.where(slowest == first, g.first, np.where(slowest == last, g.last, g.middle))
    both = {k: getattr(forward, k) + getattr(backward, k) for k in ("busy", "host", "tp", "cp", "ep", "gather")}
    shares = {k: num_micro * slow_layers * value for k, value in both.items()}
    hops = num_micro * exposed_hops
    compute_s = num_micro * slowest - sum(value for k, value in shares.items() if k != "busy") - hops
    parts = {
        "compute": compute_s,
        "host": shares["host"],
        "tp": shares["tp"],
        "cp": shares["cp"],
        "ep": shares["ep"],
        "pp_transfer": hops,
        "pp_bubble": pipe - num_micro * slowest,
        "dp": sync + shares["gather"],
        "optimizer": update,
    }
    # Devices that share a host's cores: all ranks' work together takes at least its processor time over the cores.
    work_s = g.tp * g.cp * g.dp * (num_micro * total + g.pp * (sync + update))
    path = pipe + sync + update
    cores_s = load_s(work_s, g.tp, g.pp, g.cp * g.dp, num_micro, g.cores)
    parts["shared_cores"] = shared_cores_s(path, cores_s)
    return Price(
        path + parts["shared_cores"],
        parts,
        num_micro,
        forward.total,
        backward.total,
        embedding,
        work.head_forward,
        head_backward,
        exposed_hops / np.maximum(2 * v, 1),
        g.micro_batch_s * scale["host"],
        work_s,
        cores_s,
        {
            "compute": num_micro * total / g.pp
            - num_micro * g.layers / g.pp * sum(both[k] for k in ("tp", "cp", "ep", "gather")),
            **{k: num_micro * g.layers / g.pp * both[k] for k in ("tp", "cp", "ep")},
            "dp": sync + num_micro * g.layers / g.pp * both["gather"],
            "optimizer": update,
        },
    )


def _layers(g: Grid, work: Compute, scale: Mapping[str, Array]) -> tuple[Stage, Stage]:
    """One average layer forward and backward, recompute included."""
    moe = np.where(g.experts > 0, (g.layers - g.dense_layers) / g.layers, 0.0)

    def mixed(dense: Pass, routed: Pass) -> Pass:
        blend = [(1 - moe) * getattr(dense, k) + moe * getattr(routed, k) for k in ("gemm", "attention", "vector")]
        return Pass(*blend)

    f, b = mixed(work.forward, work.moe_forward), mixed(work.backward, work.moe_backward)
    full, selective = g.recompute == 2, g.recompute == 1
    tp = comm.tp_layer_s(g, work.tokens) * scale["tp"]
    hidden = np.where(g.tp_overlap > 0, 0.37, 1.0)
    cp_raw = comm.cp_layer_s(g, work.tokens) * scale["cp"]

    def exposed_cp(attention: Array, factor: float) -> Array:
        ring = np.maximum(0.1 * factor * cp_raw, factor * cp_raw - 0.7 * attention)
        return np.where(g.cp_all_to_all > 0, factor * cp_raw, ring)

    ep = comm.ep_layer_s(g, work.tokens) * scale["ep"] * moe
    host = g.host_layer_s * scale["host"] * np.where(g.tp > 1, g.host_tp, 1.0) * np.where(softmax_is_loose(g), 1.3, 1.0)
    cp_f, cp_b = exposed_cp(f.attention, 1.0), exposed_cp(b.attention, 2.0)
    plain, routed = layer_parameters(g)
    added = _accumulate_s(g, plain + routed, scale)
    busy_b = b.total + added + np.where(full, f.total, 0.0) + np.where(selective, f.attention, 0.0)
    tp_b = np.where(g.emulated > 0, 1.0, 0.75) * tp * hidden + np.where(full, tp * hidden, 0.0)
    host_b = 1.3 * host + np.where(full, host, 0.0)
    gather, reduce = _fsdp_layer_s(g, scale)

    def stage(busy: Array, tp_s: Array, cp_s: Array, ep_s: Array, host_s: Array, traffic: Array) -> Stage:
        device = busy + tp_s + cp_s + ep_s
        launched = np.where(g.emulated > 0, device + host_s, soft_max(device, host_s))
        return Stage(busy, launched - device, tp_s, cp_s, ep_s, soft_max(launched, traffic) - launched)

    forward = stage(f.total, tp * hidden, cp_f, ep, host, gather)
    backward = stage(busy_b, tp_b, cp_b, ep * np.where(full, 2.0, 1.0), host_b, gather + reduce)
    return forward, backward


def _accumulate_s(g: Grid, parameters: Array, scale: Mapping[str, Array]) -> Array:
    """To add one micro-batch's gradient of so many `parameters` to those before, where the product itself did not."""
    rate = g.vector * g.memory_bytes_per_s
    return np.asarray(g.accumulate_bytes * parameters * (1 - g.frozen) / rate * scale["vector"])


def layer_parameters(g: Grid) -> tuple[Array, Array]:
    """Parameters of an average layer on one tp rank: (outside of experts, in experts)."""
    attention = g.hidden * (2 * g.q_width + 2 * g.kv_width) / g.tp + 2 * g.hidden
    moe = np.where(g.experts > 0, (g.layers - g.dense_layers) / g.layers, 0.0)
    dense = g.hidden * g.ffn * (2 + g.gated) / g.tp
    shared = g.hidden * g.expert_ffn * (2 + g.gated) / g.tp * g.shared_experts + g.hidden * g.experts
    routed = g.hidden * g.expert_ffn * (2 + g.gated) / g.tp * g.experts / g.ep
    return attention + (1 - moe) * dense + moe * shared, moe * routed


def stage_parameters(g: Grid) -> tuple[Array, Array]:
    """Parameters of the fullest stage on one tp rank: (outside of experts, in experts)."""
    plain, routed = layer_parameters(g)
    table = g.vocab * g.hidden / g.tp
    first = g.first * plain + table + g.positions * g.hidden + np.where((g.pp == 1) & (g.tied == 0), table, 0.0)
    middle = np.where(g.pp > 2, g.middle * plain, 0.0)
    last = np.where(g.pp > 1, g.last * plain + table, 0.0)
    return np.maximum(np.maximum(first, middle), last), routed * np.maximum(g.first, g.middle)


def _dp_scale(g: Grid, scale: Mapping[str, Array]) -> Array:
    beside = np.where((g.dp_overlap > 0) | (g.emulated > 0), DP_BUS, 1.0)  # cores are shared: other ranks compute
    return scale["dp"] * beside * np.where(comm.inside(g, comm.dp_extent(g)), 1.0, scale["network"])


def _fsdp_layer_s(g: Grid, scale: Mapping[str, Array]) -> tuple[Array, Array]:
    """All-gather of one layer's parameters, reduce-scatter of its gradients (ZeRO-3)."""
    on = g.zero >= 3
    if not np.any(on):
        return np.zeros(()), np.zeros(())
    parameters = sum(layer_parameters(g))
    group, extent = g.dp * g.cp, comm.dp_extent(g)
    slowed = _dp_scale(g, scale)
    gather = comm.half_reduce_s(g, group, extent, g.gather_bytes * parameters) * slowed
    reduce = comm.half_reduce_s(g, group, extent, g.grad_bytes * parameters) * slowed
    return np.where(on, gather, 0.0), np.where(on, reduce * (1 - g.frozen), 0.0)


def _sync(g: Grid, scale: Mapping[str, Array], last_backward: Array) -> Array:
    """Gradient reduction and parameter gathering once per step, minus what the last backward hides."""
    plain, routed = stage_parameters(g)
    group, extent = g.dp * g.cp, comm.dp_extent(g)

    def one(parameters: Array, members: Array) -> Array:
        reduce = comm.all_reduce_s(g, members, extent, g.grad_bytes * parameters)
        split = 0.5 * reduce + comm.half_reduce_s(g, members, extent, g.gather_bytes * parameters)
        return np.where(g.zero >= 1, split, reduce)

    whole = one(plain * g.trained, group)
    if np.any(g.experts > 0):
        whole = whole + np.where(g.experts > 0, one(routed * g.trained, np.maximum(group / g.ep, 1)), 0.0)
    whole = whole * _dp_scale(g, scale)
    exposed = np.where(g.dp_overlap > 0, np.maximum(whole - 0.85 * last_backward, 0.05 * whole), whole)
    return np.where(g.zero >= 3, 0.0, exposed)


def _optimizer(g: Grid, scale: Mapping[str, Array]) -> Array:
    plain, routed = stage_parameters(g)
    shard = np.where(g.zero >= 1, g.dp * g.cp, 1.0)
    owned = plain / shard + routed / np.maximum(shard / g.ep, 1)
    owned = owned * g.trained
    fixed = g.update_s + g.update_layer_s * g.layers / g.pp
    return (g.optimizer_bytes * owned / (0.8 * g.memory_bytes_per_s) + fixed) * scale["optimizer"]
