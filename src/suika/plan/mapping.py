"""Shapes -> nodes -> ranks: where a gang of a given shape stands, and which rank sits on which device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from suika.core.layout import Layout
from suika.plan.ordering import Fabric

_NEVER = np.iinfo(np.int64).max


def choose_nodes(
    shape: Sequence[int],
    available: np.ndarray,
    occupied: np.ndarray,
    own: np.ndarray | None = None,
) -> tuple[tuple[int, ...], int] | None:
    """Nodes for `shape` (devices per node, descending) and how many occupied devices that takes; None if it cannot be.

    `available` [N]: devices that may be taken, of which `occupied` [N] are held by others and would be taken from
    them; `own` [N]: held by the job itself. Each part goes to the node with the fewest devices taken from others, then
    with the most devices of its own, then the tightest fit, then the first in walk order.
    """
    chosen: list[int] = []
    taken, keyed = 0, -1
    big = int(available.max(initial=0)) + 1
    for part in shape:
        if part != keyed:  # parts are mostly alike: their keys differ by who has been chosen
            evicted = np.maximum(part - (available - occupied), 0).astype(np.int64)
            key = evicted * (big * big) + (available - part)
            if own is not None:
                key -= np.minimum(own, part) * big
            key[available < part] = _NEVER
            key[chosen] = _NEVER
            keyed = part
        node = int(key.argmin())
        if key[node] == _NEVER:
            return None
        chosen.append(node)
        key[node] = _NEVER
        taken += int(evicted[node])
    return tuple(chosen), taken


def map_ranks(layout: Layout, positions: Sequence[int], fabric: Fabric) -> tuple[int, ...]:
    """`positions` (device numbers) in rank order, each tensor-parallel group inside one NVLink domain where it can be.

    Ranks count dp, pp, cp, tp (tp fastest), so consecutive runs of tp devices are the groups: whole groups are cut from
    each domain in walk order (within a node next where a domain is too small); what is left over, if domains do not
    divide by tp, makes the last groups.
    """
    ordered = sorted(positions)
    if layout.tp == 1:
        return tuple(ordered)
    groups: list[int] = []
    for area in (fabric.domain_of, fabric.node_of):
        rest: list[int] = []
        start = 0
        for stop in range(1, len(ordered) + 1):
            if stop == len(ordered) or area[ordered[stop]] != area[ordered[start]]:
                whole = (stop - start) // layout.tp * layout.tp
                groups += ordered[start : start + whole]
                rest += ordered[start + whole : stop]
                start = stop
        ordered = rest
    if ordered:
        return tuple(groups + ordered)
    # Groups in walk order, so that pipeline neighbours are neighbours in the tree.
    runs = sorted(groups[i : i + layout.tp] for i in range(0, len(groups), layout.tp))
    return tuple(position for run in runs for position in run)
