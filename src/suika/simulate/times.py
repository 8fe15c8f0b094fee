"""Curves for simulated jobs: from a table of measured iteration times, or from the estimator's presets."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.snapshot import Option, ScalingCurve
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
    return Models(curves, f"measured iteration times ({Path(path).name})")


def _layout(plan: str, num_devices: int) -> Layout | None:
    """The layout that a plan stands for; None where its degrees are not those of the placement."""
    if plan.isdecimal() and len(plan) == 3:
        pp, tp, dp = (int(digit) for digit in plan)
        return Layout(tp=tp, pp=pp, dp=dp) if tp * pp * dp == num_devices else None
    named = _NAMED.get(plan)
    return Layout(dp=num_devices, **named) if named is not None else None  # type: ignore[arg-type]
