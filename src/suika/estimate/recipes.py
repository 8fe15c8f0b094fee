"""Which `Recipe` a row of a published table was run with: from its framework, flags and notes, else a fair guess."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from suika.estimate.catalog import DeviceType
from suika.estimate.recipe import Attention, Recipe

MEGATRON = Recipe(attention="flash-cudnn", dp_inside_pp=True, p2p_split=True, host_scale=1.0)
# 2021-22 Megatron-LM and Megatron-DeepSpeed: fp16, a softmax kernel, gradients reduced after the last backward.
MEGATRON_UNFUSED = Recipe(
    attention="unfused",
    dropout=True,
    vector_scale=0.8,
    host_scale=1.3,
    dp_overlap=False,
    p2p_overlap=False,
    p2p_split=True,
    grad_bytes=2.0,
    dp_inside_pp=True,
    fused_loss=False,
    update_scale=0.1,
)
TRANSFORMER_ENGINE = replace(MEGATRON, host_scale=1.5, vector_scale=0.8)
FSDP = Recipe(
    attention="flash-triton", host_scale=1.8, grad_bytes=4.0, fused_loss=False, vector_scale=1.1, loose_activations=True
)
UNFUSED = ("unfused", "eager", "math", "naive", "native")  # kernels that write the scores out; all others do not


def recipe_of_row(row: Mapping[str, str], device: DeviceType, precision: str) -> Recipe:
    """The recipe of a measured row. Says nothing that the row, its source or its era does not."""
    said = " ".join(row.get(k, "").lower() for k in ("source", "attention_impl", "zero_or_fsdp", "notes", "framework"))
    base = _base(said, row, device, precision)
    changes: dict[str, object] = {}
    kernel = _attention(row.get("attention_impl", "").lower(), device)
    if kernel:
        changes["attention"] = kernel
    if "vtrain" in row.get("source", "").lower():  # its model code cuts 50,257 tokens by tp as they are
        changes["pads_vocabulary"] = False
    if "mp=pure" in said:
        changes["grad_bytes"] = 2.0
    if "lora" in row.get("model", "").lower() or "lora performance" in said:
        changes["lora"] = True
    if "compile" in said or "torchtitan" in said:
        changes["vector_scale"] = 0.7
    if "cuda graph" in said or "cudagraph" in said:
        changes["cuda_graphs"] = True
    if "a2a" in said or "all-to-all" in said:
        changes["cp_all_to_all"] = True
    return replace(base, **changes)  # type: ignore[arg-type]


def _base(said: str, row: Mapping[str, str], device: DeviceType, precision: str) -> Recipe:
    if "galvatron" in said or "fsdp-" in said or "fsdp2" in said or "llm-foundry" in said or "torchtitan" in said:
        return FSDP
    old = device.generation in ("volta", "ampere") and precision == "fp16"
    if not row.get("attention_impl") and (old or "megatron-deepspeed" in said):
        return MEGATRON_UNFUSED
    if (
        precision in ("fp8", "mxfp8", "nvfp4")
        or " te " in f" {said} "
        or "transformer engine" in said
        or "nemo" in said
    ):
        return TRANSFORMER_ENGINE
    return MEGATRON


def _attention(text: str, device: DeviceType) -> Attention | None:
    if not text:
        return None
    if "te" in text.split() or "te flash" in text or "cudnn" in text or "fused" in text:
        return "flash-cudnn"
    if "triton" in text or text in ("flash-attention", "flash_attention"):
        return "flash-triton"
    return "unfused" if any(word in text for word in UNFUSED) else "flash"
