"""Random small jobs and layouts for property tests: every axis, uneven stages, odd sizes, all ZeRO stages."""

from __future__ import annotations

import labels
from hypothesis import strategies as st

from suika.core.cluster import Cluster, Device
from suika.core.layout import Layout
from suika.core.model import Lora, ModelSpec
from suika.core.plan import Plan
from suika.reshard.state import JobShape

# heads and widths divide by 1, 2, 3, 4 and 6; the vocabulary by none of them; key/value heads are fewer than most tp.
MODELS = (
    ModelSpec("llama", "llama", 4, 24, 12, 12, 29, kv_heads=2, head_dim=2),
    ModelSpec("llama-tied", "llama", 3, 24, 12, 12, 7, kv_heads=1, head_dim=2, tied=True),
    ModelSpec("gpt", "gpt", 5, 12, 24, 12, 13, max_positions=5),
    ModelSpec("gpt-tied", "gpt", 3, 12, 12, 12, 17, tied=True),
    ModelSpec("moe", "llama", 3, 12, 12, 6, 11, kv_heads=3, head_dim=2, experts=4, experts_per_token=2,
              shared_experts=1, expert_ffn=12, first_dense_layers=1),
    ModelSpec("lora", "llama", 3, 24, 12, 12, 29, kv_heads=2, head_dim=2, lora=Lora(3, ("q", "v", "o", "down"))),
    ModelSpec("frozen", "gpt", 4, 12, 12, 12, 17, tied=True,
              frozen=("layers.[01].*", "layers.2.mlp.*", "embedding.weight", "final_norm.bias")),
    ModelSpec("frozen-moe", "llama", 3, 12, 12, 6, 11, kv_heads=3, head_dim=2, experts=4, experts_per_token=2,
              expert_ffn=12, first_dense_layers=1, lora=Lora(2, ("k", "gate")),
              frozen=("layers.0.*", "layers.*.experts.1.*", "head.*")),
)  # fmt: skip


@st.composite
def shapes(draw: st.DrawFn) -> JobShape:
    return JobShape(draw(st.sampled_from(MODELS)), 4, draw(st.sampled_from(("fp32", "fp64", "bf16"))))


@st.composite
def layouts(draw: st.DrawFn, model: ModelSpec, most_ranks: int = 9) -> Layout:
    """Any layout of 1 to `most_ranks` ranks that cuts `model`."""
    tp = draw(st.sampled_from([t for t in (1, 2, 3, 4, 6) if t <= most_ranks and model.heads % t == 0 and
                               (model.kv_heads % t == 0 or t % model.kv_heads == 0)]))  # fmt: skip
    pp = draw(st.integers(1, min(model.layers, most_ranks // tp)))
    dp = draw(st.integers(1, most_ranks // (tp * pp)))
    cp = draw(st.sampled_from([c for c in (1, 2) if tp * pp * dp * c <= most_ranks]))
    virtual = draw(st.integers(1, model.layers // pp))
    chunks = pp * virtual
    cuts = sorted(draw(st.permutations(range(1, model.layers)))[: chunks - 1])
    split = tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True))
    shared = dp * cp
    ep = draw(
        st.sampled_from([e for e in (1, 2, 4) if model.experts and model.experts % e == 0 and shared % e == 0] or [1])
    )
    return Layout(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, layers_per_stage=split, virtual_stages=virtual,
        zero=draw(st.integers(0, 3)), zero_buckets=draw(st.sampled_from(("layer", "stage"))),
    )  # fmt: skip


ORDERS = st.sampled_from([("dp", "pp", "cp", "tp"), ("pp", "dp", "cp", "tp"), ("tp", "cp", "dp", "pp")])


@st.composite
def plans(draw: st.DrawFn, shape: JobShape, cluster: Cluster) -> Plan:
    layout = draw(layouts(shape.model, cluster.num_devices))
    devices: tuple[Device, ...] = tuple(draw(st.permutations(cluster.devices))[: layout.num_ranks])
    made = labels.plan(shape, layout, devices)
    return Plan(made.layout, made.placement, order=draw(ORDERS))
