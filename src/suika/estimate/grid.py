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
from numpy.typing import NDArray

from suika.core.layout import Layout, even_split
from suika.core.model import ModelSpec
from suika.core.tensors import trained_share
from suika.estimate.catalog import DeviceType, Wiring
from suika.estimate.factors import log_factors
from suika.estimate.recipe import Recipe

Array = NDArray[Any]
RECOMPUTE = ("none", "selective", "full")  # column `recompute` holds the index
HALF = ("bf16", "fp16")
LORA_SHARE = 0.01  # of the parameters, where a recipe says LoRA without saying more


@dataclass(frozen=True)
class LayoutColumns:
    """Layouts as columns. `first`, `middle`, `last`: layers of the first, the fullest middle and the last stage."""

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

    @staticmethod
    def of(layouts: Sequence[Layout], model: ModelSpec) -> LayoutColumns:
        rows = [_layout_row(layout, model) for layout in layouts]
        return LayoutColumns(*(np.array(column) for column in zip(*rows, strict=True)))

    @staticmethod
    def even(layers: int, tp: Array, pp: Array, dp: Array, **others: Any) -> LayoutColumns:
        """Columns of layouts with the even split of `layers` over pp x virtual_stages chunks, without building them."""
        one, zeros = np.ones_like(tp), np.zeros_like(tp)
        defaults = dict.fromkeys(("cp", "ep", "micro_batch", "virtual_stages", "zero"), one)
        columns = defaults | {"recompute": zeros, "sequence_parallel": zeros} | others
        keys, inverse = np.unique(pp * 4096 + columns["virtual_stages"], return_inverse=True)
        table = np.array([_even_ends(layers, *divmod(int(key), 4096)) for key in keys], dtype=int).reshape(-1, 3)
        first, middle, last = table[inverse].T
        return LayoutColumns(tp=tp, pp=pp, dp=dp, first=first, middle=middle, last=last, **columns)

    def take(self, index: Array) -> LayoutColumns:
        return LayoutColumns(*(getattr(self, f.name)[index] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.tp)

    def layout(self, i: int, model: ModelSpec | None = None) -> Layout:
        """Row i as a `Layout`; its even split is spelled out for `model`, if that is given."""
        names = ("tp", "pp", "dp", "cp", "ep", "micro_batch", "virtual_stages", "zero")
        degrees: dict[str, Any] = {name: int(getattr(self, name)[i]) for name in names}
        return Layout(
            **degrees,
            layers_per_stage=even_split(model.layers, degrees["pp"] * degrees["virtual_stages"]) if model else (),
            recompute=RECOMPUTE[int(self.recompute[i])],  # type: ignore[arg-type]
            sequence_parallel=bool(self.sequence_parallel[i]),
        )


def _ends(chunks: tuple[int, ...], pp: int) -> tuple[int, int, int]:
    """Layers of the first, the fullest middle and the last stage."""
    stages = [sum(chunks[s::pp]) for s in range(pp)]
    return stages[0], max(stages[1:-1], default=stages[0]), stages[-1]


@cache
def _even_ends(layers: int, pp: int, virtual_stages: int) -> tuple[int, int, int]:
    return _ends(even_split(layers, pp * virtual_stages), pp)


def _layout_row(layout: Layout, model: ModelSpec) -> tuple[int, ...]:
    return (
        layout.tp,
        layout.pp,
        layout.dp,
        layout.cp,
        layout.ep,
        layout.micro_batch,
        layout.virtual_stages,
        layout.zero,
        RECOMPUTE.index(layout.recompute),
        int(layout.sequence_parallel),
        *_ends(layout.resolve(model).layers_per_stage, layout.pp),
    )


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
    half_message_bytes: Array  # message at which a collective reaches half of its bus bandwidth, over two
    hop_s: Array  # start of a transfer between neighbours inside a node
    node_bus: Array
    network: Array  # bytes/s per device between nodes
    network_latency_s: Array
    local: Array  # devices that reach each other without the network
    domain: Array
    # recipe
    vector_scale: Array
    dropout: Array
    host_layer_s: Array
    host_serial: Array  # 1: dispatch and compute share a thread, their times add up
    micro_batch_s: Array
    update_s: Array
    dp_overlap: Array
    tp_overlap: Array
    p2p_overlap: Array
    p2p_split: Array
    grad_bytes: Array
    gather_bytes: Array
    fp8_scale: Array
    fused_loss: Array
    frozen: Array  # share of the matrices without a gradient
    trained: Array  # share of the parameters with gradients and optimizer state
    loose_activations: Array
    dp_inside_pp: Array
    optimizer_bytes: Array
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
        "half_message_bytes": curve["half_message_bytes"],
        "hop_s": curve["hop_us"] * 1e-6,
        "node_bus": curve["bus"] * wiring.node.bandwidth_bytes_per_s,
        "network": curve["network"] * wiring.network.bandwidth_bytes_per_s,
        "network_latency_s": wiring.network.latency_s,
        "local": local,
        "domain": wiring.domain_size,
        "vector_scale": recipe.vector_scale,
        "dropout": recipe.dropout or model.dropout > 0,
        "host_layer_s": curve["host_layer_us"] * 1e-6 * recipe.host_scale * graphs,
        "host_serial": device.generation == "cpu",
        "micro_batch_s": curve["micro_batch_us"] * 1e-6,
        "update_s": curve["update_us"] * 1e-6,
        "dp_overlap": recipe.dp_overlap,
        "tp_overlap": recipe.tp_overlap,
        "p2p_overlap": recipe.p2p_overlap,
        "p2p_split": recipe.p2p_split,
        "grad_bytes": element_bytes if element_bytes >= 4 else recipe.grad_bytes,
        "gather_bytes": element_bytes if element_bytes >= 4 else recipe.gather_bytes,
        "fp8_scale": recipe.fp8_scale,
        "fused_loss": recipe.fused_loss,
        "frozen": 1.0 if recipe.lora else 1.0 - trained,
        "trained": LORA_SHARE if recipe.lora else trained,
        "loose_activations": recipe.loose_activations,
        "dp_inside_pp": recipe.dp_inside_pp,
        "optimizer_bytes": recipe.optimizer_bytes,
        "cp_all_to_all": recipe.cp_all_to_all,
        "cores": cores,
    }
    scalars |= {f"log_{c}": v for c, v in log_factors(device, recipe, precision, fitted).items()}
    as_arrays = {k: np.asarray(float(v)) for k, v in scalars.items()}
    columns = {f.name: np.asarray(getattr(layouts, f.name), dtype=float) for f in fields(LayoutColumns)}
    return Grid(**as_arrays, **columns)
