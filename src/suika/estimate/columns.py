"""`LayoutColumns`: many layouts as numpy columns, one row per layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suika.core.layout import Layout, even_split
from suika.core.model import ModelSpec

Array = NDArray[Any]
RECOMPUTE = ("none", "selective", "full")  # column `recompute` holds the index


@dataclass(frozen=True)
class LayoutColumns:
    """Layouts as columns. `first`, `middle`, `last`: layers of the first, the fullest middle and the last stage."""

    tp: Array
    pp: Array
    dp: Array
    cp: Array
    ep: Array
    micro_batch: Array
    virtual_stages: Array
    zero: Array
    recompute: Array
    sequence_parallel: Array
    first: Array
    middle: Array
    last: Array

    @staticmethod
    def of(layouts: Sequence[Layout], model: ModelSpec) -> LayoutColumns:
        rows = [_layout_row(layout, model) for layout in layouts]
        return LayoutColumns(*(np.array(column) for column in zip(*rows, strict=True)))

    @staticmethod
    def even(layers: int, tp: Array, pp: Array, dp: Array, **others: Any) -> LayoutColumns:
        """Columns of layouts with the even split of `layers` over pp x virtual_stages chunks, without building them."""
        one, zeros = np.ones_like(tp), np.zeros_like(tp)
        defaults = dict.fromkeys(("cp", "ep", "micro_batch", "virtual_stages", "zero"), one)
        columns = defaults | {"recompute": zeros, "sequence_parallel": zeros} | others
        keys, inverse = np.unique(pp * 4096 + columns["virtual_stages"], return_inverse=True)
        table = np.array([_even_ends(layers, *divmod(int(key), 4096)) for key in keys], dtype=int).reshape(-1, 3)
        first, middle, last = table[inverse].T
        return LayoutColumns(tp=tp, pp=pp, dp=dp, first=first, middle=middle, last=last, **columns)

    def take(self, index: Array) -> LayoutColumns:
        return LayoutColumns(*(getattr(self, f.name)[index] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.tp)

    def layout(self, i: int, model: ModelSpec | None = None) -> Layout:
        """Row i as a `Layout`; its even split is spelled out for `model`, if that is given."""
        names = ("tp", "pp", "dp", "cp", "ep", "micro_batch", "virtual_stages", "zero")
        degrees: dict[str, Any] = {name: int(getattr(self, name)[i]) for name in names}
        return Layout(
            **degrees,
            layers_per_stage=even_split(model.layers, degrees["pp"] * degrees["virtual_stages"]) if model else (),
            recompute=RECOMPUTE[int(self.recompute[i])],  # type: ignore[arg-type]
            sequence_parallel=bool(self.sequence_parallel[i]),
        )


def _ends(chunks: tuple[int, ...], pp: int) -> tuple[int, int, int]:
    """Layers of the first, the fullest middle and the last stage."""
    stages = [sum(chunks[s::pp]) for s in range(pp)]
    return stages[0], max(stages[1:-1], default=stages[0]), stages[-1]


@cache
def _even_ends(layers: int, pp: int, virtual_stages: int) -> tuple[int, int, int]:
    return _ends(even_split(layers, pp * virtual_stages), pp)


def _layout_row(layout: Layout, model: ModelSpec) -> tuple[int, ...]:
    return (
        layout.tp,
        layout.pp,
        layout.dp,
        layout.cp,
        layout.ep,
        layout.micro_batch,
        layout.virtual_stages,
        layout.zero,
        RECOMPUTE.index(layout.recompute),
        int(layout.sequence_parallel),
        *_ends(layout.resolve(model).layers_per_stage, layout.pp),
    )
