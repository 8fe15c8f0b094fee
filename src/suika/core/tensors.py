"""The logical tensors of a model and the one rule by which tensor parallelism cuts them.

Everything that cuts, prices or moves weights asks this file: train builds local shards from it, reshard turns it into
boxes, estimate counts bytes with it. q, k, v, gate and up are separate tensors; a fused storage is only a view.

Tied models have no `head.weight`: the last stage holds a second copy of `embedding.weight` (an alias edge).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Literal

from suika.core.errors import require
from suika.core.model import Lora, ModelSpec

Place = Literal["embedding", "layer", "head"]


@dataclass(frozen=True)
class LogicalTensor:
    """A parameter as the whole model sees it, before any cut."""

    name: str
    shape: tuple[int, ...]
    place: Place
    layer: int | None = None  # global layer number, never a local one
    tp_dim: int | None = None  # dim that tensor parallelism cuts; None = replicated over the tp axis
    tp_unit: int = 1  # cuts fall on multiples of this many rows (a head, for q, k, v, o)
    shared_units: bool = False  # key/value heads: fewer units than tp ranks means units are replicated
    decay: bool = True  # weight decay group
    expert: int | None = None  # global expert number
    trained: bool = True  # a frozen tensor has weights only
    in_region: bool = False  # whole on every tp rank, but each sees only a part of its gradient

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def bounds(self, tp: int, tp_rank: int) -> tuple[int, int]:
        """Rows [start, stop) of `tp_dim` that tensor-parallel rank `tp_rank` of `tp` holds.

        Units (heads, rows) are shared out in order, ceil(units / tp) each, the last ranks holding less (an odd
        vocabulary). Key/value heads fewer than ranks are replicated: rank r holds head r * kv_heads // tp.
        """
        if self.tp_dim is None:
            raise ValueError(f"{self.name} is replicated over the tp axis: it has no cut")
        size = self.shape[self.tp_dim]
        units = size // self.tp_unit
        if self.shared_units and units < tp:
            first = tp_rank * units // tp
            return first * self.tp_unit, (first + 1) * self.tp_unit
        each = -(-units // tp)
        start, stop = min(tp_rank * each, units), min((tp_rank + 1) * each, units)
        return start * self.tp_unit, stop * self.tp_unit

    def local_shape(self, tp: int, tp_rank: int) -> tuple[int, ...]:
        if self.tp_dim is None:
            return self.shape
        start, stop = self.bounds(tp, tp_rank)
        return (*self.shape[: self.tp_dim], stop - start, *self.shape[self.tp_dim + 1 :])


def _norm(name: str, model: ModelSpec, place: Place, layer: int | None) -> Iterator[LogicalTensor]:
    yield LogicalTensor(f"{name}.weight", (model.hidden,), place, layer, decay=False)
    if model.family == "gpt":
        yield LogicalTensor(f"{name}.bias", (model.hidden,), place, layer, decay=False)


def _mlp(prefix: str, model: ModelSpec, layer: int, ffn: int, expert: int | None) -> Iterator[LogicalTensor]:
    bias = model.family == "gpt"
    for part in ("gate", "up") if model.gated else ("up",):
        yield LogicalTensor(f"{prefix}.{part}.weight", (ffn, model.hidden), "layer", layer, tp_dim=0, expert=expert)
        if bias:
            yield LogicalTensor(f"{prefix}.{part}.bias", (ffn,), "layer", layer, tp_dim=0, decay=False, expert=expert)
    yield LogicalTensor(f"{prefix}.down.weight", (model.hidden, ffn), "layer", layer, tp_dim=1, expert=expert)
    if bias:
        # A routed expert's is added inside of the tensor-parallel region, by the first rank: it is gated with the rest.
        routed = expert is not None
        shape = (model.hidden,)
        yield LogicalTensor(f"{prefix}.down.bias", shape, "layer", layer, decay=False, expert=expert, in_region=routed)


def _layer(model: ModelSpec, layer: int) -> Iterator[LogicalTensor]:
    """One layer in bucket order: norm, q, k, v, o, norm, gate, up, down."""
    prefix, d = f"layers.{layer}", model.head_dim
    yield from _norm(f"{prefix}.attention_norm", model, "layer", layer)
    bias = model.family == "gpt"
    for part, width in (("q", model.q_width), ("k", model.kv_width), ("v", model.kv_width)):
        cut = {"tp_dim": 0, "tp_unit": d, "shared_units": part != "q"}
        yield LogicalTensor(f"{prefix}.attention.{part}.weight", (width, model.hidden), "layer", layer, **cut)  # type: ignore[arg-type]
        if bias or model.qkv_bias:
            yield LogicalTensor(f"{prefix}.attention.{part}.bias", (width,), "layer", layer, decay=False, **cut)  # type: ignore[arg-type]
    yield LogicalTensor(
        f"{prefix}.attention.o.weight", (model.hidden, model.q_width), "layer", layer, tp_dim=1, tp_unit=d
    )
    if bias:
        yield LogicalTensor(f"{prefix}.attention.o.bias", (model.hidden,), "layer", layer, decay=False)
    yield from _norm(f"{prefix}.mlp_norm", model, "layer", layer)
    if not model.is_moe_layer(layer):
        yield from _mlp(f"{prefix}.mlp", model, layer, model.ffn, None)
        return
    yield LogicalTensor(f"{prefix}.router.weight", (model.experts, model.hidden), "layer", layer)
    for shared in range(model.shared_experts):
        yield from _mlp(f"{prefix}.shared_experts.{shared}", model, layer, model.expert_ffn, None)
    for expert in range(model.experts):
        yield from _mlp(f"{prefix}.experts.{expert}", model, layer, model.expert_ffn, expert)


@cache
def logical_tensors(model: ModelSpec, sequence_length: int = 0) -> tuple[LogicalTensor, ...]:
    """All parameters of `model`, embedding first, then layer by layer in bucket order, final norm and head last.
    Adapters follow their matrices.

    `sequence_length` sizes the learned position table of a `gpt` that does not say `max_positions`.
    """
    tensors = [LogicalTensor("embedding.weight", (model.vocab, model.hidden), "embedding", tp_dim=0)]
    if model.family == "gpt":
        rows = model.max_positions or sequence_length
        if rows <= 0:
            raise ValueError("gpt needs model.max_positions or a sequence length for its position table")
        tensors.append(LogicalTensor("positions.weight", (rows, model.hidden), "embedding"))
    for layer in range(model.layers):
        tensors.extend(_layer(model, layer))
    tensors.extend(_norm("final_norm", model, "head", None))
    if not model.tied:
        tensors.append(LogicalTensor("head.weight", (model.vocab, model.hidden), "head", tp_dim=0))
    if model.frozen:
        tensors = [replace(t, trained=not any(fnmatchcase(t.name, p) for p in model.frozen)) for t in tensors]
    if model.lora is not None:
        tensors = [part for tensor in tensors for part in (tensor, *_adapters(model.lora, tensor))]
    return tuple(tensors)


def _adapters(lora: Lora, matrix: LogicalTensor) -> Iterator[LogicalTensor]:
    """A (rank x in) and B (out x rank) beside `matrix`, where it has adapters: one is cut as the matrix is, the other
    is whole on every tp rank."""
    name, _, leaf = matrix.name.rpartition(".")
    if leaf != "weight" or name.rpartition(".")[2] not in lora.targets:
        return
    if matrix.layer is None or matrix.expert is not None:
        return
    rank, (rows, columns) = lora.rank, matrix.shape
    cut = replace(matrix, trained=True)
    whole = replace(cut, tp_dim=None, tp_unit=1, shared_units=False, in_region=True)
    yield replace(cut if matrix.tp_dim == 1 else whole, name=f"{name}.lora_a", shape=(rank, columns))
    yield replace(cut if matrix.tp_dim == 0 else whole, name=f"{name}.lora_b", shape=(rows, rank))


def check_trained(model: ModelSpec) -> None:
    """Raise `SpecError` unless each pattern of `model.frozen` freezes something, something is left to train, and each
    target of `model.lora` gets adapters somewhere."""
    tensors = logical_tensors(model, 1)
    base = [t.name for t in tensors if not t.name.endswith((".lora_a", ".lora_b"))]
    for pattern in model.frozen:
        known = any(fnmatchcase(name, pattern) for name in base)
        require(known, "model.frozen", pattern, "matches no tensor", "names are like layers.0.mlp.up.weight")
    trained = any(t.trained for t in tensors)
    require(trained, "model.frozen", list(model.frozen), "leaves nothing to train", "freeze less, or give lora")
    for part in model.lora.targets if model.lora is not None else ():
        adapted = any(t.name.endswith(f".{part}.lora_a") for t in tensors)
        problem = "is in routed experts only, which take no adapters" if model.experts else "is in no layer"
        require(adapted, "model.lora.targets", part, problem, "leave it out; q, k, v and o are in every layer")


def on_stage(model: ModelSpec, tensor: LogicalTensor, first_layer: int, last_layer: int) -> bool:
    """Whether a stage holding layers [first_layer, last_layer) holds `tensor` (tied embeddings: both ends do)."""
    first, last = first_layer == 0, last_layer == model.layers
    if tensor.place == "layer":
        assert tensor.layer is not None
        return first_layer <= tensor.layer < last_layer
    if tensor.place == "head":
        return last
    return first or (last and model.tied and tensor.name == "embedding.weight")


def trained_share(model: ModelSpec, sequence_length: int = 2048) -> float:
    """Trained parameters / all parameters."""
    tensors = logical_tensors(model, sequence_length)
    return sum(t.numel for t in tensors if t.trained) / sum(t.numel for t in tensors)


def num_parameters(model: ModelSpec, sequence_length: int = 2048) -> int:
    return sum(t.numel for t in logical_tensors(model, sequence_length))
