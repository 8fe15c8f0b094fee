"""`Grid`: N combinations of model, layout, device and recipe as numpy columns, so that all are priced at once.

Every field is an array of shape (N,) or a scalar that broadcasts to it. One model's layouts share the scalars; a table
of measured cases has a column for each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from suika.core.model import ModelSpec
from suika.core.tensors import trained_share
from suika.estimate.catalog import DeviceType, Wiring
from suika.estimate.columns import Array, LayoutColumns
from suika.estimate.factors import log_factors
from suika.estimate.recipe import Recipe

LORA_SHARE = 0.01  # of the parameters, where a recipe says LoRA without saying more


@cache
def curves() -> dict[str, Any]:
    """Fitted efficiencies by device generation (made by `suika.estimate.fit`; see docs/design/estimate.md)."""
    return json.loads((files("suika.estimate") / "data" / "curves.json").read_text())  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Grid:
    """See the module. Sizes in elements, batches in sequences, rates per device in FLOP/s and bytes/s."""

    # model
    layers: Array
    hidden: Array
    ffn: Array
    q_width: Array
    kv_width: Array
    head_dim: Array
    heads: Array
    vocab: Array
    gated: Array
    tied: Array
    experts: Array
    experts_per_token: Array
    shared_experts: Array
    expert_ffn: Array
    dense_layers: Array
    positions: Array
    # job
    sequence: Array
    global_batch: Array
    # layout
    tp: Array
    pp: Array
    dp: Array
    cp: Array
    ep: Array
    micro_batch: Array
    virtual_stages: Array
    zero: Array
    recompute: Array
    sequence_parallel: Array
    first: Array
    middle: Array
    last: Array
    # device
    peak: Array  # of the wide GEMMs (head, and layers without low precision)
    low_gain: Array  # rate of the layers' GEMMs over the wide rate
    low: Array  # 1 where the layers' GEMMs run in 8 bits or fewer
    element_bytes: Array
    memory_bytes: Array
    memory_bytes_per_s: Array
    num_units: Array
    gemm: Array
    gemm_k0: Array
    gemm_wave: Array
    attention: Array  # fraction of the wide peak that the attention kernel reaches on long sequences
    unfused: Array  # 1: scores go through memory
    vector: Array
    bus: Array  # bytes/s of a collective inside the domain
    bus_latency_s: Array  # start of a collective of four
    bus_growth: Array  # its power of the group size
    one_hop_bytes: Array  # a sum of more than two ranks' larger messages takes two rounds of them
    half_message_bytes: Array  # message at which a collective reaches half of its bus bandwidth, over two
    hop_s: Array  # start of a transfer between neighbours inside a node
    node_bus: Array
    network: Array  # bytes/s per device between nodes
    devices_per_adapter: Array  # that share one network adapter
    network_latency_s: Array
    local: Array  # devices that reach each other without the network
    domain: Array
    # recipe
    vector_scale: Array
    dropout: Array
    host_layer_s: Array
    host_tp: Array  # host time of a layer with tensor parallelism over that without: its meetings are launched, too
    emulated: Array  # 1: a core is the device, which dispatches, computes and fetches one after the other
    micro_batch_s: Array
    update_s: Array
    update_layer_s: Array  # of an update, for each layer that a rank has
    dp_overlap: Array
    tp_overlap: Array
    p2p_overlap: Array
    p2p_split: Array
    grad_bytes: Array
    gather_bytes: Array
    fp8_scale: Array
    fused_loss: Array
    pads_vocabulary: Array
    frozen: Array  # share of the matrices without a gradient
    trained: Array  # share of the parameters with gradients and optimizer state
    loose_activations: Array
    dp_inside_pp: Array
    optimizer_bytes: Array
    accumulate_bytes: Array
    cp_all_to_all: Array
    # fitted log factors by op class
    log_gemm: Array
    log_low: Array
    log_attention: Array
    log_vector: Array
    log_tp: Array
    log_cp: Array
    log_ep: Array
    log_p2p: Array
    log_dp: Array
    log_network: Array
    log_host: Array
    log_optimizer: Array
    cores: Array  # processes of one host share this many cores; 0: devices do not share

    def __len__(self) -> int:
        return max(int(np.size(getattr(self, f.name))) for f in fields(self))

    @staticmethod
    def stack(grids: Sequence[Grid]) -> Grid:
        """All rows of several grids, in order."""
        sizes = [len(grid) for grid in grids]
        columns = []
        for f in fields(Grid):
            parts = [np.broadcast_to(getattr(g, f.name), n) for g, n in zip(grids, sizes, strict=True)]
            columns.append(np.concatenate(parts))
        return Grid(*columns)


def make_grid(
    model: ModelSpec,
    layouts: LayoutColumns,
    device: DeviceType,
    wiring: Wiring,
    recipe: Recipe,
    global_batch: int,
    sequence_length: int,
    precision: str,
    cores: float = 0,
    fitted: Mapping[str, float] | None = None,
) -> Grid:
    """One model's layouts on one device type. `fitted` replaces the shipped factors (see `factors`)."""
    low = precision in ("fp8", "mxfp8", "nvfp4")
    wide = "bf16" if low else precision
    curve = curves()["generations"][device.generation]
    peak = device.peak(wide)
    gain = device.peak(precision) / peak * curve["low"].get(precision, 1.0) if low else 1.0
    element_bytes = {"fp64": 8, "fp32": 4, "tf32": 4}.get(precision, 2)
    graphs = 0.0 if recipe.cuda_graphs else 1.0
    local = max(wiring.devices_per_node, wiring.domain_size)
    trained = trained_share(model, sequence_length) if model.frozen else 1.0
    scalars: dict[str, Any] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "q_width": model.q_width,
        "kv_width": model.kv_width,
        "head_dim": model.head_dim,
        "heads": model.heads,
        "vocab": model.vocab,
        "gated": model.gated,
        "tied": model.tied,
        "experts": model.experts,
        "experts_per_token": model.experts_per_token,
        "shared_experts": model.shared_experts,
        "expert_ffn": model.expert_ffn,
        "dense_layers": min(model.first_dense_layers, model.layers) if model.experts else model.layers,
        "positions": (model.max_positions or sequence_length) if model.family == "gpt" else 0,
        "sequence": sequence_length,
        "global_batch": global_batch,
        "peak": peak,
        "low_gain": gain,
        "low": low,
        "element_bytes": element_bytes,
        "memory_bytes": device.memory_bytes,
        "memory_bytes_per_s": device.memory_bytes_per_s,
        "num_units": device.num_units,
        "gemm": curve["gemm"],
        "gemm_k0": curve["gemm_k0"],
        "gemm_wave": curve["gemm_wave"],
        "attention": curve["attention"][recipe.attention],
        "unfused": recipe.attention == "unfused",
        "vector": curve["vector"],
        "bus": curve["bus"] * wiring.domain.bandwidth_bytes_per_s,
        "bus_latency_s": curve["bus_latency_us"] * 1e-6,
        "bus_growth": curve["bus_growth"],
        "one_hop_bytes": curve.get("one_hop_bytes", np.inf),
        "half_message_bytes": curve["half_message_bytes"],
        "hop_s": curve["hop_us"] * 1e-6,
        "node_bus": curve["bus"] * wiring.node.bandwidth_bytes_per_s,
        "network": curve["network"] * wiring.network.bandwidth_bytes_per_s,
        "devices_per_adapter": wiring.devices_per_adapter,
        "network_latency_s": wiring.network.latency_s,
        "local": local,
        "domain": wiring.domain_size,
        "vector_scale": recipe.vector_scale,
        "dropout": recipe.dropout or model.dropout > 0,
        "host_layer_s": curve["host_layer_us"] * 1e-6 * recipe.host_scale * graphs,
        "host_tp": curve["host_tp"],
        "emulated": device.generation == "cpu",
        "micro_batch_s": curve["micro_batch_us"] * 1e-6,
        "update_s": curve["update_us"] * 1e-6 * recipe.update_scale,
        "update_layer_s": curve.get("update_layer_us", 0.0) * 1e-6,
        "dp_overlap": recipe.dp_overlap,
        "tp_overlap": recipe.tp_overlap,
        "p2p_overlap": recipe.p2p_overlap,
        "p2p_split": recipe.p2p_split,
        "grad_bytes": element_bytes if element_bytes >= 4 else recipe.grad_bytes,
        "gather_bytes": element_bytes if element_bytes >= 4 else recipe.gather_bytes,
        "fp8_scale": recipe.fp8_scale,
        "fused_loss": recipe.fused_loss,
        "pads_vocabulary": recipe.pads_vocabulary,
        "frozen": 1.0 if recipe.lora else 1.0 - trained,
        "trained": LORA_SHARE if recipe.lora else trained,
        "loose_activations": recipe.loose_activations,
        "dp_inside_pp": recipe.dp_inside_pp,
        "optimizer_bytes": recipe.optimizer_bytes,
        "accumulate_bytes": recipe.accumulate_bytes,
        "cp_all_to_all": recipe.cp_all_to_all,
        "cores": cores,
    }
    scalars |= {f"log_{c}": v for c, v in log_factors(device, recipe, precision, fitted).items()}
    as_arrays = {k: np.asarray(float(v)) for k, v in scalars.items()}
    columns = {f.name: np.asarray(getattr(layouts, f.name), dtype=float) for f in fields(LayoutColumns)}
    return Grid(**as_arrays, **columns)
