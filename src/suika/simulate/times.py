"""Curves for simulated jobs: from a table of measured iteration times, or from the estimator's presets."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from suika.core.cluster import Cluster
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.snapshot import Option, ScalingCurve
from suika.plan.curves import scaling_curve
from suika.reshard.state import JobShape
from suika.simulate.trace import lines

# Plans that the table names in words: data parallel over all devices, and what each rank keeps or recomputes.
_NAMED: Mapping[str, dict[str, object]] = {
    "ga": {"zero": 0},
    "gc": {"zero": 0, "recompute": "full"},
    "zero-dp": {"zero": 1},
    "zero-offload": {"zero": 2},  # to the host, which a Layout does not say
}


@dataclass(frozen=True)
class Models:
    """Curves by model name, and where they come from (for reports)."""

    curves: Mapping[str, ScalingCurve]
    source: str
    shapes: Mapping[str, JobShape] = field(default_factory=dict)  # for the bytes of moves
    by_name_only: frozenset[str] = frozenset()  # never assigned to jobs that name no model

    def curve(self, name: str) -> ScalingCurve:
        if name not in self.curves:
            raise SpecError("model", name, "no curve for this model", f"known: {', '.join(sorted(self.curves))}")
        return self.curves[name]


def measured(path: str | Path) -> Models:
    """Curves of the Rubick artifact's iteration_times.csv: model, exec_plan, placement, iter_time (s; 0 = missing).

    `placement` has one digit per node: devices used there. Of several plans on one shape the fastest is the option. A
    plan of three digits is (pp, tp, dp): the file does not say so, but first digits of 3, 5 and 6 divide llama-30B's
    60 layers and no batch, the second divides heads (5 of GPT-2 XL's 25), and the third are powers of two.
    """
    fastest: dict[str, dict[tuple[int, ...], Option]] = {}
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SpecError("times", str(path), f"cannot be read: {error}") from None
    reader = csv.DictReader(lines(text))
    for row in reader:
        try:
            step_s = float(row["iter_time"])
            shape = tuple(sorted((int(digit) for digit in row["placement"]), reverse=True))
            layout = _layout(row["exec_plan"], sum(shape))
        except (KeyError, ValueError, TypeError) as error:
            raise SpecError(
                "times", str(path), f"line {reader.line_num}: {error!r}", "see docs/design/simulate.md"
            ) from None
        best = fastest.setdefault(row["model"], {})
        if step_s > 0 and layout is not None and (shape not in best or step_s < best[shape].step_s):
            best[shape] = Option(shape, layout, step_s, "")
    curves = {
        model: ScalingCurve(tuple(sorted(options.values(), key=lambda o: (o.num_devices, len(o.shape), o.shape))))
        for model, options in fastest.items()
        if options
    }
    return Models(curves, f"measured iteration times ({Path(path).name})", MEASURED_SHAPES, SIDE_TABLES)


def _layout(plan: str, num_devices: int) -> Layout | None:
    """The layout that a plan stands for; None where its degrees are not those of the placement."""
    if plan.isdecimal() and len(plan) == 3:
        pp, tp, dp = (int(digit) for digit in plan)
        return Layout(tp=tp, pp=pp, dp=dp) if tp * pp * dp == num_devices else None
    named = _NAMED.get(plan)
    return Layout(dp=num_devices, **named) if named is not None else None  # type: ignore[arg-type]


# The artifact's own workloads use seven models; these are variants of two of them.
SIDE_TABLES = frozenset({"llama7b_bsz16", "t5_3B"})
# Shapes of the table's models, for the bytes of their state. Those that are no decoders stand by one of their size.
MEASURED_SHAPES: Mapping[str, JobShape] = {
    model.name: JobShape(model, 1024, "bf16", 64)
    for model in (
        ModelSpec("vit", "gpt", 12, 768, 3072, 12, 1000, tied=True),
        ModelSpec("bert", "gpt", 24, 1024, 4096, 16, 30522, tied=True),
        ModelSpec("roberta", "gpt", 24, 1024, 4096, 16, 50265, tied=True),
        ModelSpec("t5", "gpt", 48, 1536, 6144, 24, 32128, tied=True),
        ModelSpec("t5_3B", "gpt", 48, 2048, 8192, 32, 32128, tied=True),
        ModelSpec("gpt2", "gpt", 48, 1600, 6400, 25, 50257, tied=True),
        ModelSpec("llama7", "llama", 32, 4096, 11008, 32, 32000),
        ModelSpec("llama7b_bsz16", "llama", 32, 4096, 11008, 32, 32000),
        ModelSpec("llama30", "llama", 60, 6656, 17920, 52, 32000),
    )
}

# What stands in for the models of traces that name none, where no measured table is given: (model, sequences per step).
PRESETS: tuple[tuple[ModelSpec, int, int], ...] = (
    (ModelSpec("gpt2-350m", "gpt", 24, 1024, 4096, 16, 50257, tied=True), 256, 1024),
    (ModelSpec("gpt2-1.5b", "gpt", 48, 1600, 6400, 25, 50257, tied=True), 256, 1024),
    (ModelSpec("llama-3b", "llama", 26, 3200, 8640, 32, 32000), 256, 2048),
    (ModelSpec("llama-7b", "llama", 32, 4096, 11008, 32, 32000), 256, 2048),
    (ModelSpec("llama-13b", "llama", 40, 5120, 13824, 40, 32000), 256, 2048),
    (ModelSpec("llama-30b", "llama", 60, 6656, 17920, 52, 32000), 256, 2048),
    (ModelSpec("llama-70b", "llama", 80, 8192, 28672, 64, 32000, kv_heads=8), 256, 4096),
)


def estimated(cluster: Cluster) -> Models:
    """Curves of the presets on `cluster`, by the estimator, at powers of two of devices (and whole nodes up to 4)."""
    node = max(n.num_devices for n in cluster.nodes)
    counts = sorted(
        {2**i for i in range(20) if 2**i <= cluster.num_devices}
        | {node * k for k in range(1, 5) if node * k <= cluster.num_devices}
    )
    curves = {}
    for model, global_batch, sequence_length in PRESETS:
        curve = scaling_curve(model, cluster, global_batch=global_batch, sequence_length=sequence_length, counts=counts)
        if curve.options:
            curves[model.name] = curve
    shapes = {model.name: JobShape(model, length, "bf16", batch) for model, batch, length in PRESETS}
    return Models(curves, "the estimator's presets", shapes)
