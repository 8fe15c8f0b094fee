"""Every legal layout of a model on a number of devices, enumerated as numpy columns.

Legal is what `core.layout.check_layout` accepts, with two rules of placement on top: a tensor-parallel group stays
inside one node, and key/value heads are split evenly or replicated evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.estimate.columns import RECOMPUTE, Array, LayoutColumns


@dataclass(frozen=True)
class Space:
    """Which choices are open. `BUILT_IN`: what the built-in trainer runs, less interleaved stages (by the estimate they
    gain 1 to 5 %, but it does not know what their messages cost ranks that share cores: ask for them with a fixed
    layout); `MEGATRON`: what Megatron-style stacks do."""

    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    virtual_stages: tuple[int, ...] = (1,)
    recompute: tuple[str, ...] = ("none",)
    cp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)
    zero: tuple[int, ...] = (1,)
    sequence_parallel: bool = False  # with tp > 1
    shortest_part: int = 2048  # tokens of a sequence on one context-parallel rank: below, cp is not worth a look
    max_tp: int = 8
    max_pp: int = 64


BUILT_IN = Space(cp=(1, 2, 4, 8), ep=(1, 2, 4, 8, 16, 32, 64), shortest_part=4096)
MEGATRON = Space(
    micro_batches=(1, 2, 4, 8, 16),
    virtual_stages=(1, 2, 4),
    recompute=("none", "full"),  # with fused attention there are no scores for the selective kind to drop
    cp=(1, 2, 4, 8),
    ep=(1, 2, 4, 8, 16, 32, 64),
    zero=(1, 3),
    sequence_parallel=True,
)


def legal_tps(model: ModelSpec, limit: int) -> list[int]:
    """Tensor-parallel degrees up to `limit` that cut heads, key/value heads and every feed-forward width evenly."""
    widths = [model.ffn, *([model.expert_ffn] if model.experts else [])]
    return [
        tp
        for tp in range(1, min(limit, model.heads, model.vocab) + 1)
        if model.heads % tp == 0
        and (model.kv_heads % tp == 0 or tp % model.kv_heads == 0)
        and all(width % tp == 0 for width in widths)
    ]


def layout_columns(
    model: ModelSpec,
    counts: Sequence[int],
    *,
    global_batch: int,
    sequence_length: int,
    space: Space = BUILT_IN,
    devices_per_node: int = 8,
) -> LayoutColumns:
    """All legal layouts of `model` on each of `counts` devices. dp may leave a remainder of the global batch:
    shares of dp ranks then differ by one micro-batch."""
    blocks = []
    wanted = np.asarray(counts)
    for tp in legal_tps(model, min(space.max_tp, devices_per_node)):
        for pp in range(1, min(model.layers, space.max_pp) + 1):
            for cp in (c for c in space.cp if c == 1 or _worth(c, sequence_length, space)):
                fits = wanted[wanted % (tp * pp * cp) == 0]
                if len(fits):
                    blocks.append(
                        _block(model, tp, pp, cp, fits // (tp * pp * cp), global_batch, sequence_length, space)
                    )
    rows = [np.concatenate(column) for column in zip(*filter(len, blocks), strict=True)] if blocks else []
    names = ("tp", "pp", "dp", "cp", "ep", "micro_batch", "virtual_stages", "zero", "recompute", "sequence_parallel")
    if not rows:
        rows = [np.empty(0, dtype=int) for _ in names]
    columns = dict(zip(names, rows, strict=True))
    return LayoutColumns.even(model.layers, columns.pop("tp"), columns.pop("pp"), columns.pop("dp"), **columns)


def _worth(cp: int, sequence_length: int, space: Space) -> bool:
    """Context parallelism is legal where 2 x cp cuts the sequence, and worth a look where each part is long."""
    return sequence_length % (2 * cp) == 0 and sequence_length // cp >= space.shortest_part


def _block(
    model: ModelSpec, tp: int, pp: int, cp: int, dps: Array, global_batch: int, sequence_length: int, space: Space
) -> list[Array]:
    """Columns of all layouts with these tp, pp, cp and any of `dps`."""
    sp = int(space.sequence_parallel and tp > 1 and sequence_length % (tp * cp) == 0)
    choices = _choices(
        tuple(e for e in space.ep if e == 1 or (model.experts and model.experts % e == 0)),
        tuple(b for b in space.micro_batches if global_batch % b == 0),
        tuple(v for v in space.virtual_stages if v == 1 or (pp > 1 and pp * v <= model.layers)),
        tuple(z for z in space.zero if z < 3 or pp == 1),  # sharded parameters and a pipeline do not mix well
        tuple(RECOMPUTE.index(kind) for kind in space.recompute),
    )
    dp = np.repeat(dps, choices.shape[1])
    ep, b, v, zero, kind = np.tile(choices, len(dps))
    batches = global_batch // b
    least = batches // dp
    ok = (least >= pp) & (dp * cp % ep == 0)
    ok &= (v == 1) | ((batches % dp == 0) & (least % pp == 0))
    ok &= (ep == 1) | (batches % dp == 0)
    dp, ep, b, v, zero, kind = (axis[ok] for axis in (dp, ep, b, v, zero, kind))
    full = np.full_like
    return [full(dp, tp), full(dp, pp), dp, full(dp, cp), ep, b, v, zero, kind, full(dp, sp)]


@cache
def _choices(*options: tuple[int, ...]) -> Array:
    """(len(options), combinations): every combination, the last option changing fastest."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*options, indexing="ij")])


def legal_layouts(
    model: ModelSpec,
    num_devices: int,
    *,
    global_batch: int,
    sequence_length: int,
    space: Space = BUILT_IN,
    devices_per_node: int = 8,
) -> list[Layout]:
    """`layout_columns` for one device count, as `Layout` objects."""
    columns = layout_columns(
        model,
        [num_devices],
        global_batch=global_batch,
        sequence_length=sequence_length,
        space=space,
        devices_per_node=devices_per_node,
    )
    return [columns.layout(i) for i in range(len(columns))]
