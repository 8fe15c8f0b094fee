"""Measured cases from a table with the columns of `measured_dev.csv`: each row is a `Case`, or skipped with a reason.

A blank is not a value. Only these have a documented default, because the numbers hardly depend on them: kv_heads
(= heads), ffn (4 x hidden for a plain MLP), vocab (what the source's code says, else 51,200 for GPT, 32,000 for
others), cp, ep, vpp (1), sp (on with tp > 1 in Megatron-style stacks that do not say), recompute (none),
gpus_per_node (the catalog's).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.estimate.catalog import DeviceType, Wiring
from suika.estimate.columns import LayoutColumns
from suika.estimate.grid import Grid, make_grid
from suika.estimate.recipe import Recipe
from suika.estimate.recipes import recipe_of_row
from suika.estimate.rows import (
    device_of,
    interleaves_silently,
    layout_of,
    model_of,
    peak_bytes_of,
    precision_of,
    recompute_if_needed,
    refuse_disagreement,
    refuse_impossible,
    sequence_parallel_default,
    stated_network,
    version_of,
)
from suika.estimate.table import SkipError, number, positive, refuse_torn, whole


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
    version: str  # of the software, if the row says
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


def parse_cases(rows: Sequence[Mapping[str, str]]) -> tuple[list[Case], list[Skipped]]:
    """Every row, either as a case or as skipped with its reason."""
    cases, skipped = [], []
    for line, row in enumerate(rows, start=2):  # line 1 is the header
        try:
            cases.append(_case(line, row))
        except SkipError as reason:
            skipped.append(_skipped(line, row, str(reason)))
        except SpecError as error:
            skipped.append(_skipped(line, row, f"contradictory: {error.field}: {error.problem.split('(')[0]}"))
    return cases, skipped


def _skipped(line: int, row: Mapping[str, str], reason: str) -> Skipped:
    gpus = number(row.get("gpus", ""))
    bucket = "<=8" if gpus is not None and gpus <= 8 else ">8"
    return Skipped(line, row.get("source", ""), row.get("gpu_type", ""), bucket, reason)


def _case(line: int, row: Mapping[str, str]) -> Case:
    refuse_torn(row)
    device = device_of(row)
    num_devices = whole(row, "gpus")
    model = model_of(row)
    precision = precision_of(row)
    layout = layout_of(row, num_devices)
    global_batch, sequence = whole(row, "gbs"), whole(row, "seq")
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
    step_s, peak = positive(row, "iter_time_s"), peak_bytes_of(row)
    if step_s is None and peak is None:
        raise SkipError("missing: iter_time_s and peak_mem_gb")
    if step_s is not None:
        refuse_disagreement(row, step_s, num_devices, global_batch * sequence)
        refuse_impossible(step_s, num_devices * device.peak(precision), model, global_batch * sequence)
    per_node = whole(row, "gpus_per_node", device.devices_per_node)
    wiring = Wiring.of(device)
    domain = wiring.domain_size if wiring.domain_size > wiring.devices_per_node else min(wiring.domain_size, per_node)
    wiring = replace(wiring, devices_per_node=per_node, domain_size=domain)
    wiring = stated_network(wiring, row.get("interconnect", ""))
    if sequence_parallel_default(row, recipe) and layout.tp > 1:
        layout = replace(layout, sequence_parallel=True)
    if not row.get("recompute") and recipe.host_scale > 1.6:
        layout = recompute_if_needed(model, layout, device, wiring, recipe, global_batch, sequence, precision)
    kind = (
        "allocator" if "allocated" in row.get("notes", "") or "max over recorded" in row.get("notes", "") else "driver"
    )
    return Case(
        line,
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
        version_of(row),
        global_batch,
        sequence,
        precision,
        step_s,
        peak,
        kind,
    )


def groups(cases: Sequence[Case]) -> Iterator[list[int]]:
    """Indices of cases that share source, device type, model, sequence, precision and a size bucket (8, 64, more)."""
    found: dict[tuple[object, ...], list[int]] = {}
    for i, case in enumerate(cases):
        size = 0 if case.num_devices <= 8 else 1 if case.num_devices <= 64 else 2
        key = (case.source, case.gpu_type, case.model_name, case.sequence_length, case.precision, size)
        found.setdefault(key, []).append(i)
    yield from found.values()
