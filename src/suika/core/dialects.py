"""Other tools' ways to say a model or a layout, as `ModelSpec` and `Layout`: Hugging Face `config.json` contents and
Megatron-LM flags. Parses; opens nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from suika.core.errors import SpecError, require
from suika.core.layout import Layout
from suika.core.model import ModelSpec

GATED_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
PLAIN_TYPES = ("gpt2", "gpt_neox", "gpt_bigcode", "opt", "mpt", "bloom")
MOST = 1e300  # of a number that is not whole
# Our field -> the names that config.json files use for it, most common first.
_NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "vocab": ("vocab_size",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "max_positions": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "experts": ("num_experts", "num_local_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_ffn": ("moe_intermediate_size",),
}


def from_huggingface(config: Any, name: str = "") -> ModelSpec:
    """A model from the contents of its `config.json`. Raises `SpecError` naming what is missing or not supported."""
    require(isinstance(config, Mapping), "config.json", config, "must be a JSON object")
    kind = str(config.get("model_type", ""))
    known = kind in (*GATED_TYPES, *PLAIN_TYPES)
    require(known, "config.json.model_type", kind, "is not supported", f"known: {', '.join(GATED_TYPES + PLAIN_TYPES)}")
    gated = kind in GATED_TYPES
    values = {field: _number(config, field, names) for field, names in _NAMES.items()}
    for field in ("layers", "hidden", "heads", "vocab"):
        require(bool(values[field]), f"config.json.{_NAMES[field][0]}", None, "is missing")
    values["ffn"] = values["ffn"] or (0 if gated else 4 * values["hidden"])
    require(values["ffn"] > 0, "config.json.intermediate_size", None, "is missing")
    if gated:
        values["max_positions"] = 0  # rotary: no table
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or kind),
        family="llama" if gated else "gpt",
        tied=_switch(config, "tie_word_embeddings", not gated),
        qkv_bias=_switch(config, "attention_bias", kind in ("qwen2", "qwen2_moe")),
        rope_theta=_real(config, "rope_theta", 10_000.0),
        norm_eps=_real(config, "rms_norm_eps", _real(config, "layer_norm_epsilon", 1e-5)),
        shared_experts=1 if config.get("shared_expert_intermediate_size") else 0,
        balance=_real(config, "router_aux_loss_coef", 0.0),
        **values,  # type: ignore[arg-type]
    )


def _number(config: Mapping[str, Any], field: str, names: Sequence[str]) -> int:
    for name in names:
        value = config.get(name)
        if value is not None:
            ok = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            require(ok, f"config.json.{name}", value, f"must be a whole number ({field})")
            return int(value)
    return 0


def _real(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    ok = value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST)
    require(ok, f"config.json.{name}", value, "must be a finite number")
    return float(value or default)


def _switch(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name)
    require(value is None or isinstance(value, bool), f"config.json.{name}", value, "must be true or false")
    return default if value is None else bool(value)


def megatron_flags(text: str | Sequence[str]) -> dict[str, str]:
    """Flags of a Megatron-LM command line as {name: value} ("" for a switch); other words are left out."""
    try:
        words = shlex.split(text) if isinstance(text, str) else list(text)
    except ValueError as error:
        raise SpecError("megatron flags", text, f"cannot be read: {error}", "close the quotation") from None
    flags: dict[str, str] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            name, eq, value = word[2:].partition("=")
            following = words[i + 1] if i + 1 < len(words) else ""
            flags[name] = value if eq else "" if following.startswith("--") else following
    return flags


def model_from_megatron(text: str | Sequence[str], name: str = "megatron") -> ModelSpec:
    """A model from Megatron-LM flags."""
    flags = megatron_flags(text)
    hidden, heads = _flag(flags, "hidden-size"), _flag(flags, "num-attention-heads")
    gated = "swiglu" in flags
    grouped = "group-query-attention" in flags
    experts = _flag(flags, "num-experts", 0)
    return ModelSpec(
        name,
        "llama" if gated else "gpt",
        _flag(flags, "num-layers"),
        hidden,
        _flag(flags, "ffn-hidden-size", 4 * hidden),
        heads,
        _flag(flags, "padded-vocab-size", _flag(flags, "vocab-size", 51200)),
        kv_heads=_flag(flags, "num-query-groups", heads) if grouped else heads,
        head_dim=_flag(flags, "kv-channels", 0),
        max_positions=0 if gated else _flag(flags, "max-position-embeddings", 0),
        tied="untie-embeddings-and-output-weights" not in flags,
        experts=experts,
        experts_per_token=_flag(flags, "moe-router-topk", 2) if experts else 0,
        expert_ffn=_flag(flags, "moe-ffn-hidden-size", 0) if experts else 0,
        balance=_real_flag(flags, "moe-aux-loss-coeff"),
    )


def layout_from_megatron(text: str | Sequence[str], num_devices: int, layers: int) -> Layout:
    """A layout from Megatron-LM flags on `num_devices` devices; dp is what the other axes leave."""
    flags = megatron_flags(text)
    tp, pp = _flag(flags, "tensor-model-parallel-size", 1), _flag(flags, "pipeline-model-parallel-size", 1)
    cp = _flag(flags, "context-parallel-size", 1)
    product = tp * pp * cp
    require(num_devices % product == 0, "devices", num_devices, f"is not a multiple of tp({tp}) x pp({pp}) x cp({cp})")
    each = _flag(flags, "num-layers-per-virtual-pipeline-stage", 0)
    if each:
        require(
            layers % (pp * each) == 0, "num-layers-per-virtual-pipeline-stage", each, f"layers({layers}) do not fit"
        )
    granularity = flags.get("recompute-granularity", "none")
    if granularity not in ("none", "full", "selective"):
        raise SpecError("recompute-granularity", granularity, "unknown kind", "use full or selective")
    return Layout(
        tp=tp,
        pp=pp,
        dp=num_devices // product,
        cp=cp,
        ep=_flag(flags, "expert-model-parallel-size", 1),
        micro_batch=_flag(flags, "micro-batch-size", 1),
        virtual_stages=layers // (pp * each) if each else 1,
        zero=1 if "use-distributed-optimizer" in flags else 0,
        recompute=granularity,  # type: ignore[arg-type]
        sequence_parallel="sequence-parallel" in flags and tp > 1,
    )


def _flag(flags: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = flags.get(name)
    if text is None:
        if default is None:
            raise SpecError(f"--{name}", None, "is missing", "give the model's Megatron flags in full")
        return default
    require(text.isdecimal() and len(text) < 20, f"--{name}", text, "must be a whole number")
    return int(text)


def _real_flag(flags: Mapping[str, str], name: str) -> float:
    try:
        return float(flags.get(name) or 0.0)
    except ValueError:
        raise SpecError(f"--{name}", flags[name], "must be a number") from None
