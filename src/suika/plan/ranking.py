"""Every legal layout of a model on a cluster, ranked, with the reason why each lost or does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Estimate
from suika.core.tensors import logical_tensors
from suika.estimate.columns import LayoutColumns
from suika.estimate.predict import Setting, estimate_layout, estimate_many
from suika.plan.layouts import Space, layout_columns


@dataclass(frozen=True)
class RankedPlan:
    """One layout's place. `mfu` counts the model's FLOPs (causal attention, no recompute) against the dense peak."""

    layout: Layout
    estimate: Estimate
    fits: bool
    tokens_per_s_per_device: float
    mfu: float
    why: str  # why it is not the best; empty for the best


@dataclass(frozen=True)
class Ranking:
    """The fastest plans that fit, the fastest that do not, and how many layouts were looked at."""

    plans: tuple[RankedPlan, ...]
    rejected: tuple[RankedPlan, ...]
    num_layouts: int
    num_fitting: int


def rank_layouts(s: Setting, num_devices: int, space: Space, top: int = 10) -> Ranking:
    """All layouts priced at once; the first few again with the exact pipeline recurrence."""
    columns = layout_columns(
        s.model,
        [num_devices],
        global_batch=s.global_batch,
        sequence_length=s.sequence_length,
        space=space,
        devices_per_node=min(num_devices, max(s.wiring.devices_per_node, s.wiring.domain_size)),
    )
    if not len(columns):
        return Ranking((), (), 0, 0)
    prices, memories = estimate_many(s, columns)
    fits = memories.p90 <= s.device.memory_bytes
    order = np.argsort(np.asarray(prices.step_s), kind="stable")
    winners = [i for i in order if fits[i]][: 2 * top]
    losers = [i for i in order if not fits[i]][: max(top // 3, 1)]
    plans = sorted((_ranked(s, columns, int(i), True) for i in winners), key=lambda p: p.estimate.step_s)[:top]
    rejected = [_ranked(s, columns, int(i), False) for i in losers]
    if plans:
        plans = [plans[0], *(replace(p, why=why_slower(p.estimate, plans[0].estimate)) for p in plans[1:])]
    return Ranking(tuple(plans), tuple(rejected), len(columns), int(fits.sum()))


def _ranked(s: Setting, columns: LayoutColumns, i: int, fits: bool) -> RankedPlan:
    layout = columns.layout(i, s.model)
    estimate = estimate_layout(s, layout)
    tokens = s.global_batch * s.sequence_length
    rate = tokens / estimate.step_s / layout.num_ranks
    mfu = rate * flops_per_token(s.model, s.sequence_length) / s.device.peak(s.precision)
    why = "" if fits else why_not(estimate, s.device.memory_bytes)
    return RankedPlan(layout, estimate, fits, rate, mfu, why)


def flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """Forward and backward of one token: 6 per active parameter outside of the lookup tables, plus causal attention."""
    active = 0.0
    for tensor in logical_tensors(model, sequence_length):
        if tensor.name == "positions.weight" or (tensor.name == "embedding.weight" and not model.tied):
            continue
        share = model.experts_per_token / model.experts if tensor.expert is not None else 1.0
        active += tensor.numel * share
    return 6 * active + 6 * model.layers * sequence_length * model.q_width


PART_NAMES = {
    "compute": "compute",
    "host": "kernel launches",
    "tp": "tensor-parallel traffic",
    "cp": "context-parallel traffic",
    "ep": "expert traffic",
    "pp_transfer": "stage-to-stage transfers",
    "pp_bubble": "pipeline bubble",
    "dp": "exposed data-parallel traffic",
    "optimizer": "optimizer step",
}


def why_slower(slow: Estimate, best: Estimate) -> str:
    """The one or two parts that cost most against the best plan."""
    more = {k: slow.parts_s.get(k, 0.0) - best.parts_s.get(k, 0.0) for k in PART_NAMES}
    total = slow.step_s - best.step_s
    if total <= 0:
        return "as fast as the best"
    causes = sorted((v, k) for k, v in more.items() if v > 0.15 * total)[::-1][:2]
    said = " and ".join(f"{PART_NAMES[k]} +{100 * v / best.step_s:.1f} %" for v, k in causes)
    return f"{100 * total / best.step_s:.1f} % slower: {said}"


def why_not(estimate: Estimate, memory_bytes: float) -> str:
    """Which part of the memory is too much."""
    parts: Mapping[str, int] = estimate.memory_parts_bytes
    largest = max(parts, key=lambda k: parts[k])
    need, have = estimate.peak_p90_bytes / 1e9, memory_bytes / 1e9
    return f"needs {need:.1f} GB of {have:.0f} GB (p90); {largest} alone {parts[largest] / 1e9:.1f} GB"
