"""What a row of measured cases says: its device, model, precision, layout and wiring, and whether it can be true."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from suika.core.cluster import Link
from suika.core.errors import SpecError
from suika.core.layout import Layout, Recompute
from suika.core.model import ModelSpec
from suika.estimate.catalog import DeviceType, Wiring, resolve
from suika.estimate.columns import LayoutColumns
from suika.estimate.grid import make_grid
from suika.estimate.memory import memory
from suika.estimate.recipe import Recipe
from suika.estimate.table import NO, YES, SkipError, flag, number, positive, whole

GATED_NAMES = ("llama", "qwen", "mistral", "mixtral", "deepseek", "gemma", "yi-", "internlm", "baichuan", "kimi", "glm")
VOCABULARY = {"vtrain": 50257}  # of a source that leaves it out of its table but states it in its model code
# Of two that a text names the first one counts: mixed precision computes in the narrow one.
PRECISIONS = {
    "nvfp4": ("nvfp4", "fp4"),
    "mxfp8": ("mxfp8",),
    "fp8": ("fp8", "e4m3", "e5m2"),
    "bf16": ("bf16", "bfloat16"),
    "fp16": ("fp16", "float16", "half"),
    "tf32": ("tf32",),
    "fp32": ("fp32", "float32"),
}
LONGEST_S = 86_400.0  # of a step that was measured
PEAK_GB = (1e-3, 1e3)  # of one device: what lies outside is in bytes, MB or TB


def device_of(row: Mapping[str, str]) -> DeviceType:
    name = row.get("gpu_type", "")
    if not name:
        if number(row.get("iter_time_s", "")) is None and number(row.get("peak_mem_gb", "")) is not None:
            return resolve("A100-80GB")  # memory hardly depends on the device
        raise SkipError("missing: gpu_type")
    try:
        return resolve(name)
    except SpecError:
        raise SkipError("unknown device type") from None


def model_of(row: Mapping[str, str]) -> ModelSpec:
    layers, hidden, heads = whole(row, "layers"), whole(row, "hidden"), whole(row, "heads")
    if hidden % heads and not row.get("head_dim"):
        raise SkipError("contradictory: heads do not divide hidden")
    name = row.get("model", "") or "model"
    ffn = whole(row, "ffn", 4 * hidden)
    gated = _is_gated(row, name, layers, hidden, ffn)
    vocab = whole(row, "vocab", 32000 if gated else VOCABULARY.get(row.get("source", "").lower(), 51200))
    kv_heads = whole(row, "kv_heads", heads)
    if heads % kv_heads:
        raise SkipError("contradictory: kv_heads do not divide heads")
    tied = not gated and "nemotron" not in name.lower()
    experts = whole(row, "num_experts", 1)
    return ModelSpec(
        name,
        "llama" if gated else "gpt",
        layers,
        hidden,
        ffn,
        heads,
        vocab,
        kv_heads=kv_heads,
        head_dim=whole(row, "head_dim", hidden // heads),
        tied=tied,
        experts=experts if experts > 1 else 0,
        experts_per_token=whole(row, "experts_per_token", 1) if experts > 1 else 0,
        expert_ffn=whole(row, "expert_ffn", ffn) if experts > 1 else 0,
    )


def _is_gated(row: Mapping[str, str], name: str, layers: int, hidden: int, ffn: int) -> bool:
    """Whether the MLP has a gate: from the name, else from the stated number of parameters, else from its width."""
    lower = name.lower()
    if any(word in lower for word in GATED_NAMES):
        return True
    if any(word in lower for word in ("gpt", "mpt", "opt", "bloom", "nemotron", "bert", "t5", "megatron", "falcon")):
        return False
    stated = number(row.get("params_b", ""))
    if stated:
        vocab = number(row.get("vocab", "")) or 51200
        plain, with_gate = (layers * hidden * (4 * hidden + n * ffn) + vocab * hidden for n in (2, 3))
        return abs(math.log(with_gate / (stated * 1e9))) < abs(math.log(plain / (stated * 1e9)))
    return ffn < 3.9 * hidden


def precision_of(row: Mapping[str, str]) -> str:
    """`bf16` of `BF16 mixed`, `bf16` or `torch.bfloat16`."""
    text = row.get("precision", "").lower()
    if not text:
        raise SkipError("missing: precision")
    words = re.findall("[a-z0-9]+", text)
    found = (name for name, spellings in PRECISIONS.items() if any(w.startswith(spellings) for w in words))
    name = next(found, None)
    if name is None:
        raise SkipError("unknown precision")
    return name


def layout_of(row: Mapping[str, str], num_devices: int) -> Layout:
    tp, pp = whole(row, "tp", 1), whole(row, "pp", 1)
    cp, ep = whole(row, "cp", 1), whole(row, "ep", 1)
    if num_devices % (tp * pp * cp):
        raise SkipError("contradictory: gpus is not a multiple of tp x pp x cp")
    dp = whole(row, "dp", num_devices // (tp * pp * cp))
    if tp * pp * cp * dp != num_devices:
        raise SkipError("contradictory: tp x pp x cp x dp is not the number of gpus")
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        micro_batch=whole(row, "mbs"),
        virtual_stages=whole(row, "vpp", 1) if pp > 1 else 1,
        zero=_zero(row.get("zero_or_fsdp", "")),
        recompute=_recompute(row.get("recompute", "")),
        sequence_parallel=flag(row, "sp") and tp > 1,
    )


def _recompute(text: str) -> Recompute:
    lower = text.lower()
    if lower in NO:
        return "none"
    if "select" in lower or "core" in lower:
        return "selective"
    if lower in YES or lower.startswith(("full", "block", "uniform")):
        return "full"
    raise SkipError("unknown recompute")


def _zero(text: str) -> int:
    lower = text.lower()
    stage = re.search(r"zero-?(\d)(?:/(\d))?", lower)
    if stage:  # "2/3": the profiler's memory is that of the higher one
        return min(int(stage[2] or stage[1]), 3)
    if lower == "none":
        return 0
    return 3 if lower.startswith("fsdp") else 1


def stated_network(wiring: Wiring, text: str) -> Wiring:
    """`1600 Gb/s ... per node` or a simulator's `inter_node_bandwidth 800` (Gb/s of a node) replace the catalog's.
    Less than an adapter of the catalog for each device means that devices share adapters."""
    rate = r"(\d+(?:\.\d+)?)"
    found = re.search(f"inter_node_bandwidth {rate}", text) or re.search(rf"{rate} ?Gb/s [^;,]*per node", text)
    if not found:
        return wiring
    network = Link(float(found[1]) * 1e9 / 8 / wiring.devices_per_node, wiring.network.latency_s)
    shared = max(1.0, wiring.network.bandwidth_bytes_per_s / network.bandwidth_bytes_per_s)
    return replace(wiring, network=network, devices_per_adapter=shared)


def version_of(row: Mapping[str, str]) -> str:
    """`25.11` of `25.11 NeMo Container`; empty where the notes name none, as if all such rows had the same."""
    found = re.search(r"(\d+\.\d+(?:\.\d+)?) (?:nemo )?container", row.get("notes", "").lower())
    return found[1] if found else ""


def interleaves_silently(row: Mapping[str, str], recipe: Recipe) -> bool:
    """NVIDIA's tables leave out (or print 1 for) the virtual stages of runs that do interleave."""
    said = (row.get("source", "") + row.get("notes", "")).lower()
    return "nemo" in said and row.get("vpp", "") in ("", "1") and recipe.dp_inside_pp


def sequence_parallel_default(row: Mapping[str, str], recipe: Recipe) -> bool:
    """A stack that does not say: Megatron-style low-precision and flash-attention stacks run it with tp."""
    return row.get("sp", "") == "" and recipe.attention != "unfused"


def recompute_if_needed(
    model: ModelSpec,
    layout: Layout,
    device: DeviceType,
    wiring: Wiring,
    recipe: Recipe,
    global_batch: int,
    sequence: int,
    precision: str,
) -> Layout:
    """A sharded-parameters run that does not say whether it recomputes did so if it could not have fitted otherwise."""
    columns = LayoutColumns.of([layout], model)
    used = memory(make_grid(model, columns, device, wiring, recipe, global_batch, sequence, precision)).peak
    return replace(layout, recompute="full") if float(np.ravel(used)[0]) > device.memory_bytes else layout


def refuse_disagreement(row: Mapping[str, str], step_s: float, num_devices: int, tokens: int) -> None:
    """Two columns that say the same thing must agree: catches milliseconds, minutes and other batches."""
    rate = number(row.get("tokens_per_s_per_gpu", ""))
    if rate is not None and rate > 0 and not 0.8 < rate * num_devices * step_s / tokens < 1.25:
        raise SkipError("contradictory: iter_time_s and tokens_per_s_per_gpu disagree (units?)")


def peak_bytes_of(row: Mapping[str, str]) -> float | None:
    """The measured memory peak of one device, if the row has one."""
    peak = positive(row, "peak_mem_gb")
    if peak is None:
        return None
    if not PEAK_GB[0] <= peak <= PEAK_GB[1]:
        raise SkipError("out of range: peak_mem_gb (units?)")
    return peak * 1e9


def refuse_impossible(step_s: float, peak: float, model: ModelSpec, tokens: int) -> None:
    """A step takes its FLOPs at peak, counted low (no embedding, no weight gradients, one expert), and ends the same
    day: what does not is in other units."""
    per_layer = model.hidden * (2 * model.q_width + 2 * model.kv_width)
    per_layer += (model.expert_ffn or model.ffn) * model.hidden * (2 + model.gated)
    if step_s < 4 * model.layers * per_layer * tokens / peak:
        raise SkipError("contradictory: iter_time_s is below what the devices' peak allows (units?)")
    if step_s > LONGEST_S:
        raise SkipError("out of range: iter_time_s (units?)")
