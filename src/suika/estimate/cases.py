"""Measured cases from a table with the columns of `measured_dev.csv`: each row is a `Case`, or skipped with a reason.

A blank is not a value. Only these have a documented default, because the numbers hardly depend on them: kv_heads
(= heads), ffn (4 x hidden for a plain MLP), vocab (51,200 for GPT, 32,000 for others), cp, ep, vpp (1), sp (on with
tp > 1 in Megatron-style stacks that do not say), recompute (none), gpus_per_node (the catalog's).
"""

from __future__ import annotations

import csv
import gzip
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from suika.core.cluster import Link
from suika.core.errors import SpecError
from suika.core.layout import Layout, Recompute
from suika.core.model import ModelSpec
from suika.estimate.catalog import DeviceType, Wiring, resolve
from suika.estimate.grid import Grid, LayoutColumns, make_grid
from suika.estimate.memory import memory
from suika.estimate.recipe import Recipe
from suika.estimate.recipes import recipe_of_row

GATED_NAMES = ("llama", "qwen", "mistral", "mixtral", "deepseek", "gemma", "yi-", "internlm", "baichuan", "kimi", "glm")
FAST_SPELLINGS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "fp8_cs": "fp8",
    "fp8_ds": "fp8",
}
PRECISIONS = ("bf16", "fp16", "fp32", "tf32", "fp8", "mxfp8", "nvfp4")


class SkipError(Exception):
    """This row cannot be priced; the message is the reason, the same for all rows like it."""


NO, YES = ("", "none", "no", "0", "false", "off"), ("yes", "1", "true", "on")
LONGEST_S = 86_400.0  # of a step that was measured
_TOO_MANY, _TOO_FEW = "more values than columns", "fewer values than columns"


@dataclass(frozen=True)
class Case:
    """One measured run, ready to be priced."""

    row: int
    source: str
    gpu_type: str  # as the table spells it
    num_devices: int
    model_name: str
    model: ModelSpec
    layout: Layout
    virtual_stages: int  # as stated; the layout has fewer where embedding and head were chunks of their own
    device: DeviceType
    wiring: Wiring
    recipe: Recipe
    global_batch: int
    sequence_length: int
    precision: str
    step_s: float | None
    peak_bytes: float | None
    peak_kind: str  # allocator or driver

    @property
    def bucket(self) -> str:
        return "<=8" if self.num_devices <= 8 else ">8"

    @property
    def family(self) -> str:
        return f"{self.source}/{self.gpu_type}/{self.bucket}"

    def grid(self, fitted: Mapping[str, float] | None = None) -> Grid:
        columns = LayoutColumns.of([self.layout], self.model)
        if self.virtual_stages != self.layout.virtual_stages:
            # Embedding and head took chunks of their own: layers + 2 slots over the stages.
            middle = np.array([-(-(self.model.layers + 2) // self.layout.pp)])
            v = np.array([self.virtual_stages])
            columns = replace(columns, virtual_stages=v, first=middle - 1, middle=middle, last=middle - 1)
        return make_grid(
            self.model,
            columns,
            self.device,
            self.wiring,
            self.recipe,
            self.global_batch,
            self.sequence_length,
            self.precision,
            fitted=fitted,
        )


@dataclass(frozen=True)
class Skipped:
    row: int
    source: str
    gpu_type: str
    bucket: str
    reason: str


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file, gzipped or not. Raises `SpecError` if it cannot be read as one."""
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        # utf-8-sig: a byte order mark is no part of the first column's name.
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            table = csv.DictReader(file, restkey=_TOO_MANY, restval=None)
            rows = [_cells(row) for row in table]
            names = {name.strip() for name in table.fieldnames or ()}
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, gzip.BadGzipFile) as error:
        raise SpecError("cases", str(path), f"cannot be read: {error}", "give a CSV file, plain or gzipped") from None
    if not rows:
        raise SpecError("cases", str(path), "has no rows", "the first line names the columns")
    missing = [name for name in ("gpus", "layers", "hidden", "seq", "gbs") if name not in names]
    if missing:
        raise SpecError(
            "cases", str(path), f"lacks the columns {', '.join(missing)}", "use the columns of measured_dev.csv"
        )
    return rows


def _cells(row: Mapping[str | None, Any]) -> dict[str, str]:
    """The cells that have a column. `_TOO_MANY` or `_TOO_FEW` where values and columns do not match: then none can be
    trusted."""
    cells = {k.strip(): v.strip() for k, v in row.items() if k and isinstance(v, str)}
    wrong = _TOO_MANY if _TOO_MANY in row else _TOO_FEW if None in row.values() else ""
    return cells | ({wrong: "yes"} if wrong else {})


def parse_cases(rows: Sequence[Mapping[str, str]]) -> tuple[list[Case], list[Skipped]]:
    """Every row, either as a case or as skipped with its reason."""
    cases, skipped = [], []
    for number, row in enumerate(rows, start=2):  # line 1 is the header
        try:
            cases.append(_case(number, row))
        except SkipError as reason:
            skipped.append(_skipped(number, row, str(reason)))
        except SpecError as error:
            skipped.append(_skipped(number, row, f"contradictory: {error.field}: {error.problem.split('(')[0]}"))
    return cases, skipped


def _skipped(number: int, row: Mapping[str, str], reason: str) -> Skipped:
    gpus = _number(row.get("gpus", ""))
    bucket = "<=8" if gpus is not None and gpus <= 8 else ">8"
    return Skipped(number, row.get("source", ""), row.get("gpu_type", ""), bucket, reason)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text:
        if default is None:
            raise SkipError(f"missing: {name}")
        return default
    value = _number(text)
    if value is None or value != int(value):
        raise SkipError(f"not a whole number: {name}")
    if not 0 < value < 1e9:
        raise SkipError(f"out of range: {name}")
    return int(value)


def _case(number: int, row: Mapping[str, str]) -> Case:
    for wrong in (_TOO_MANY, _TOO_FEW):
        if wrong in row:
            raise SkipError(f"not a row of this table: {wrong}")
    device = _device(row)
    num_devices = _whole(row, "gpus")
    model = _model(row)
    precision = _precision(row)
    layout = _layout(row, num_devices)
    global_batch, sequence = _whole(row, "gbs"), _whole(row, "seq")
    if global_batch % (layout.micro_batch * layout.dp):
        raise SkipError("contradictory: global batch is not a multiple of micro-batch x dp")
    recipe = recipe_of_row(row, device, precision)
    if interleaves_silently(row, recipe) and layout.pp > 1 and model.layers % layout.pp == 0:
        layout = replace(layout, virtual_stages=model.layers // layout.pp)
    virtual_stages = layout.virtual_stages
    if layout.pp * virtual_stages > model.layers + 2:
        raise SkipError("contradictory: more pipeline chunks than layers")
    if layout.pp * virtual_stages > model.layers:
        layout = replace(layout, virtual_stages=model.layers // layout.pp)
    if model.heads % layout.tp and layout.tp <= model.heads:
        raise SkipError("contradictory: tp does not divide the heads")
    step_s, peak = _measured(row, "iter_time_s"), _measured(row, "peak_mem_gb")
    if step_s is None and peak is None:
        raise SkipError("missing: iter_time_s and peak_mem_gb")
    if step_s is not None:
        _agrees(row, step_s, num_devices, global_batch * sequence)
        _is_possible(step_s, num_devices * device.peak(precision), model, global_batch * sequence)
    per_node = _whole(row, "gpus_per_node", device.devices_per_node)
    wiring = Wiring.of(device)
    domain = wiring.domain_size if wiring.domain_size > wiring.devices_per_node else min(wiring.domain_size, per_node)
    wiring = replace(wiring, devices_per_node=per_node, domain_size=domain)
    wiring = _stated_network(wiring, row.get("interconnect", ""))
    if sequence_parallel_default(row, recipe) and layout.tp > 1:
        layout = replace(layout, sequence_parallel=True)
    if not row.get("recompute") and recipe.host_scale > 1.6:
        layout = _recompute_if_needed(model, layout, device, wiring, recipe, global_batch, sequence, precision)
    kind = (
        "allocator" if "allocated" in row.get("notes", "") or "max over recorded" in row.get("notes", "") else "driver"
    )
    return Case(
        number,
        row.get("source", "") or "unknown",
        row.get("gpu_type", ""),
        num_devices,
        row.get("model", ""),
        model,
        layout,
        virtual_stages,
        device,
        wiring,
        recipe,
        global_batch,
        sequence,
        precision,
        step_s,
        peak * 1e9 if peak is not None else None,
        kind,
    )


def _device(row: Mapping[str, str]) -> DeviceType:
    name = row.get("gpu_type", "")
    if not name:
        if _number(row.get("iter_time_s", "")) is None and _number(row.get("peak_mem_gb", "")) is not None:
            return resolve("A100-80GB")  # memory hardly depends on the device
        raise SkipError("missing: gpu_type")
    try:
        return resolve(name)
    except SpecError:
        raise SkipError("unknown device type") from None


def _model(row: Mapping[str, str]) -> ModelSpec:
    layers, hidden, heads = _whole(row, "layers"), _whole(row, "hidden"), _whole(row, "heads")
    if hidden % heads and not row.get("head_dim"):
        raise SkipError("contradictory: heads do not divide hidden")
    name = row.get("model", "") or "model"
    ffn = _whole(row, "ffn", 4 * hidden)
    gated = _is_gated(row, name, layers, hidden, ffn)
    vocab = _whole(row, "vocab", 32000 if gated else 51200)
    kv_heads = _whole(row, "kv_heads", heads)
    if heads % kv_heads:
        raise SkipError("contradictory: kv_heads do not divide heads")
    tied = not gated and "nemotron" not in name.lower()
    experts = _whole(row, "num_experts", 1)
    return ModelSpec(
        name,
        "llama" if gated else "gpt",
        layers,
        hidden,
        ffn,
        heads,
        vocab,
        kv_heads=kv_heads,
        head_dim=_whole(row, "head_dim", hidden // heads),
        tied=tied,
        experts=experts if experts > 1 else 0,
        experts_per_token=_whole(row, "experts_per_token", 1) if experts > 1 else 0,
        expert_ffn=_whole(row, "expert_ffn", ffn) if experts > 1 else 0,
    )


def _is_gated(row: Mapping[str, str], name: str, layers: int, hidden: int, ffn: int) -> bool:
    """Whether the MLP has a gate: from the name, else from the stated number of parameters, else from its width."""
    lower = name.lower()
    if any(word in lower for word in GATED_NAMES):
        return True
    if any(word in lower for word in ("gpt", "mpt", "opt", "bloom", "nemotron", "bert", "t5", "megatron", "falcon")):
        return False
    stated = _number(row.get("params_b", ""))
    if stated:
        vocab = _number(row.get("vocab", "")) or 51200
        plain, with_gate = (layers * hidden * (4 * hidden + n * ffn) + vocab * hidden for n in (2, 3))
        return abs(math.log(with_gate / (stated * 1e9))) < abs(math.log(plain / (stated * 1e9)))
    return ffn < 3.9 * hidden


def _precision(row: Mapping[str, str]) -> str:
    text = row.get("precision", "").lower()
    if not text:
        raise SkipError("missing: precision")
    text = FAST_SPELLINGS.get(text, text)
    if text not in PRECISIONS:
        raise SkipError("unknown precision")
    return text


def _layout(row: Mapping[str, str], num_devices: int) -> Layout:
    tp, pp = _whole(row, "tp", 1), _whole(row, "pp", 1)
    cp, ep = _whole(row, "cp", 1), _whole(row, "ep", 1)
    if num_devices % (tp * pp * cp):
        raise SkipError("contradictory: gpus is not a multiple of tp x pp x cp")
    dp = _whole(row, "dp", num_devices // (tp * pp * cp))
    if tp * pp * cp * dp != num_devices:
        raise SkipError("contradictory: tp x pp x cp x dp is not the number of gpus")
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        micro_batch=_whole(row, "mbs"),
        virtual_stages=_whole(row, "vpp", 1) if pp > 1 else 1,
        zero=_zero(row.get("zero_or_fsdp", "")),
        recompute=_recompute(row.get("recompute", "")),
        sequence_parallel=_flag(row, "sp") and tp > 1,
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


def _flag(row: Mapping[str, str], name: str) -> bool:
    text = row.get(name, "").lower()
    if text not in (*NO, *YES):
        raise SkipError(f"not a flag: {name}")
    return text in YES


def _zero(text: str) -> int:
    lower = text.lower()
    stage = re.search(r"zero-?(\d)(?:/(\d))?", lower)
    if stage:  # "2/3": the profiler's memory is that of the higher one
        return min(int(stage[2] or stage[1]), 3)
    if lower == "none":
        return 0
    return 3 if lower.startswith("fsdp") else 1


def _stated_network(wiring: Wiring, text: str) -> Wiring:
    """`1600 Gb/s ... per node` or a simulator's `inter_node_bandwidth 800` (Gb/s of a node) replace the catalog's."""
    found = re.search(r"inter_node_bandwidth (\d+)", text) or re.search(r"(\d+) ?Gb/s [^;,]*per node", text)
    if not found:
        return wiring
    rate = float(found[1]) * 1e9 / 8 / wiring.devices_per_node
    return replace(wiring, network=Link(rate, wiring.network.latency_s))


def interleaves_silently(row: Mapping[str, str], recipe: Recipe) -> bool:
    """NVIDIA's tables leave out (or print 1 for) the virtual stages of runs that do interleave."""
    said = (row.get("source", "") + row.get("notes", "")).lower()
    return "nemo" in said and row.get("vpp", "") in ("", "1") and recipe.dp_inside_pp


def sequence_parallel_default(row: Mapping[str, str], recipe: Recipe) -> bool:
    """A stack that does not say: Megatron-style low-precision and flash-attention stacks run it with tp."""
    return row.get("sp", "") == "" and recipe.attention != "unfused"


def _recompute_if_needed(
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


def _measured(row: Mapping[str, str], name: str) -> float | None:
    text = row.get(name, "")
    if not text:
        return None
    value = _number(text)
    if value is None or value <= 0:
        raise SkipError(f"not a positive number: {name}")
    return value


def _agrees(row: Mapping[str, str], step_s: float, num_devices: int, tokens: int) -> None:
    """Two columns that say the same thing must agree: catches milliseconds, minutes and other batches."""
    rate = _number(row.get("tokens_per_s_per_gpu", ""))
    if rate is not None and rate > 0 and not 0.8 < rate * num_devices * step_s / tokens < 1.25:
        raise SkipError("contradictory: iter_time_s and tokens_per_s_per_gpu disagree (units?)")


def _is_possible(step_s: float, peak: float, model: ModelSpec, tokens: int) -> None:
    """A step takes its FLOPs at peak, counted low (no embedding, no weight gradients, one expert), and ends the same
    day: what does not is in other units."""
    per_layer = model.hidden * (2 * model.q_width + 2 * model.kv_width)
    per_layer += (model.expert_ffn or model.ffn) * model.hidden * (2 + model.gated)
    if step_s < 4 * model.layers * per_layer * tokens / peak:
        raise SkipError("contradictory: iter_time_s is below what the devices' peak allows (units?)")
    if step_s > LONGEST_S:
        raise SkipError("out of range: iter_time_s (units?)")


def groups(cases: Sequence[Case]) -> Iterator[list[int]]:
    """Indices of cases that share source, device type, model, sequence, precision and a size bucket (8, 64, more)."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, case in enumerate(cases):
        size = 0 if case.num_devices <= 8 else 1 if case.num_devices <= 64 else 2
        key = (case.source, case.gpu_type, case.model_name, case.sequence_length, case.precision, size)
        found.setdefault(key, []).append(i)
    yield from found.values()
