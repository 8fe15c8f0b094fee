"""Predicted beside measured, for every layout in which a job of the demo trained long enough to be measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from suika.core.layout import Layout
from suika.demo.result import Prediction


@dataclass
class Predictions:
    """Fed with the rows of `ps`, again and again; a layout's last word counts."""

    _measured: dict[tuple[str, Layout], tuple[float, float]] = field(default_factory=dict)
    _foretold: dict[tuple[str, Layout], float] = field(default_factory=dict)

    def note(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            if row["layout"] is None or row["predicted_step_s"] is None:
                continue
            key = (row["name"], Layout.from_dict(row["layout"]))
            if row["state"] == "redeploying":  # shown with the layout that it is going to
                self._foretold[key] = row["predicted_step_s"]
            elif row["step_s"] is not None and row["state"] == "running":
                self._measured[key] = (row["step_s"], row["predicted_step_s"])

    def found(self) -> tuple[Prediction, ...]:
        return tuple(
            Prediction(name, layout, measured_s, predicted_s, self._foretold.get((name, layout)))
            for (name, layout), (measured_s, predicted_s) in self._measured.items()
        )
