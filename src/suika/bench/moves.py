"""`suika bench moves`: the bytes of many moves against their exact lower bounds (planning only).

Each case places the old layout on consecutive devices, chooses devices for the new one as the scheduler would (all of
them on growth and re-layout, by covered bytes on a shrink) and compares the placement with the rank-level optimum.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np

from suika.core.cluster import parse_cluster_shorthand
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.reshard.assignment import assign, bound_bytes, inbound_bytes, worst_rank_bound_bytes
from suika.reshard.cells import groups_of
from suika.reshard.moveplan import plan_move
from suika.reshard.predict import GPU, predict_move
from suika.reshard.state import JobShape

DEVICES_PER_NODE = 8

MODELS = {
    "llama-7b": ModelSpec("llama-7b", "llama", 32, 4096, 11008, 32, 32000),
    "llama-70b": ModelSpec("llama-70b", "llama", 80, 8192, 28672, 64, 32000, kv_heads=8),
    "gpt3-175b": ModelSpec("gpt3-175b", "gpt", 96, 12288, 49152, 96, 50257, tied=True, max_positions=2048),
    "moe-235b": ModelSpec(
        "moe-235b", "llama", 94, 4096, 12288, 64, 151936, kv_heads=4, head_dim=128,
        experts=128, experts_per_token=8, expert_ffn=1536,
    ),
}  # fmt: skip


class Transition(NamedTuple):
    """`note`: what it is an example of."""

    model: str
    old: Layout
    new: Layout
    note: str


def _t(tp: int, pp: int, dp: int, **other: Any) -> Layout:
    return Layout(tp=tp, pp=pp, dp=dp, **other)


STAGE = {"zero_buckets": "stage"}
TRANSITIONS = (
    Transition("llama-7b", _t(2, 2, 2), _t(4, 1, 2), "re-layout"),
    Transition("llama-7b", _t(1, 2, 4), _t(2, 2, 2), "re-layout"),
    Transition("llama-7b", _t(2, 1, 4), _t(2, 1, 8), "grow 8 > 16"),
    Transition("llama-7b", _t(2, 2, 4), _t(2, 1, 4), "shrink 16 > 8"),
    Transition("llama-7b", _t(2, 2, 4), _t(2, 2, 3), "shrink to an odd dp"),
    Transition("llama-7b", _t(2, 3, 4), _t(2, 2, 8), "uneven stages, 24 > 32"),
    Transition("llama-70b", _t(8, 4, 2), _t(4, 4, 4), "published"),
    Transition("llama-70b", _t(8, 4, 2), _t(8, 2, 4), "published"),
    Transition("llama-70b", _t(8, 2, 4), _t(8, 4, 2), "published"),
    Transition("llama-70b", _t(8, 2, 4, **STAGE), _t(8, 4, 2, **STAGE), "published, stage-wide buckets"),
    Transition("llama-70b", _t(8, 4, 1), _t(8, 4, 2), "published, grow 32 > 64"),
    Transition("llama-70b", _t(8, 4, 2), _t(8, 4, 1), "published, shrink 64 > 32"),
    Transition("llama-70b", _t(8, 4, 4), _t(8, 8, 2), "deeper pipeline"),
    Transition("llama-70b", _t(8, 5, 3), _t(4, 4, 8), "120 > 128, uneven"),
    Transition("llama-70b", _t(8, 4, 16), _t(8, 4, 32), "grow 512 > 1,024"),
    Transition("llama-70b", _t(8, 4, 32), _t(8, 4, 16), "shrink 1,024 > 512"),
    Transition("llama-70b", _t(8, 4, 32), _t(4, 4, 64), "re-layout of 1,024"),
    Transition("llama-70b", _t(8, 4, 32), _t(8, 2, 64), "re-layout of 1,024"),
    Transition("llama-70b", _t(8, 5, 20), _t(4, 8, 32), "800 > 1,024, uneven"),
    Transition("gpt3-175b", _t(8, 8, 2), _t(8, 16, 1), "tied, deeper pipeline"),
    Transition("gpt3-175b", _t(8, 8, 4), _t(4, 16, 4), "tied, narrower"),
    Transition("gpt3-175b", _t(8, 12, 4), _t(8, 12, 5), "tied, grow to an odd dp"),
    Transition("gpt3-175b", _t(8, 16, 8), _t(8, 8, 8), "tied, shrink 1,024 > 512"),
    Transition("moe-235b", _t(4, 4, 8, ep=8), _t(4, 4, 16, ep=8), "experts, grow 128 > 256"),
    Transition("moe-235b", _t(4, 4, 16, ep=8), _t(4, 8, 8, ep=8), "experts, deeper pipeline"),
    Transition("moe-235b", _t(4, 4, 16, ep=8), _t(4, 4, 16, ep=16), "experts spread wider"),
    Transition("moe-235b", _t(4, 4, 16, ep=16), _t(2, 4, 16, ep=16), "experts, shrink 256 > 128"),
)


def run(model: str = "", most_devices: int = 1024) -> dict[str, Any]:
    """Plan every transition (of `model`, if given) that fits on `most_devices` and compare with the exact bounds.

    Cases carry bytes (moved_bytes_identity: rank i stays on device i), the worst rank's inbound bytes, both bounds,
    the predicted pause and the seconds that assignment, routes and rounds took with nothing cached.
    """
    chosen = [t for t in TRANSITIONS if model in ("", t.model) and _num_devices(t) <= most_devices]
    return {"cases": [_case(transition) for transition in chosen]}


def _num_devices(transition: Transition) -> int:
    return max(transition.old.num_ranks, transition.new.num_ranks)


def _case(transition: Transition) -> dict[str, Any]:
    shape = JobShape(MODELS[transition.model], 4096, "bf16")
    num_nodes = -(-_num_devices(transition) // DEVICES_PER_NODE)
    cluster = parse_cluster_shorthand(f"{num_nodes}x{DEVICES_PER_NODE}:H100")
    old_layout, new_layout = transition.old.resolve(shape.model), transition.new.resolve(shape.model)
    old = Plan(old_layout, Placement(cluster.devices[: old_layout.num_ranks]))
    candidates = cluster.devices[: _num_devices(transition)]
    _forget()
    start = time.perf_counter()
    devices = assign(shape, old, new_layout, candidates, cluster)
    new = Plan(new_layout, Placement(devices))
    move = plan_move(shape, old, new, cluster, chunk_bytes=GPU.chunk_bytes)
    planning_s = time.perf_counter() - start
    inbound = inbound_bytes(shape, old, new_layout, devices)
    in_order = inbound_bytes(shape, old, new_layout, candidates[: new_layout.num_ranks])
    return {
        "case": f"{transition.model} {old_layout} -> {new_layout} ({transition.note})",
        "devices": _num_devices(transition),
        "moved_bytes_identity": int(np.trace(in_order)),
        "moved_bytes": move.moved_bytes,
        "bound_bytes": bound_bytes(inbound),
        "worst_rank_bytes": max(move.received_bytes),
        "worst_rank_bound_bytes": worst_rank_bound_bytes(inbound),
        "network_bytes": move.network_bytes,
        "predicted_pause_s": predict_move(shape, old, new, cluster, GPU).pause_s,
        "planning_s": planning_s,
    }


def _forget() -> None:
    """Nothing of an earlier case may speed up the next one's planning."""
    from suika.reshard import assignment

    groups_of.cache_clear()
    assignment._overlap.cache_clear()
