"""What ranks say to each other: alpha-beta times by link class, message and group size. Seconds per rank."""

from __future__ import annotations

import numpy as np

from suika.estimate.columns import Array
from suika.estimate.grid import Grid


def inside(g: Grid, extent: Array) -> Array:
    """Whether a group whose members lie within `extent` consecutive ranks stays off the network."""
    return extent <= g.local


def all_reduce_s(g: Grid, group: Array, extent: Array, message_bytes: Array) -> Array:
    """All-reduce, or reduce-scatter + all-gather, of `message_bytes` in a group within `extent` consecutive ranks."""
    local_bus = np.where(extent <= g.domain, g.bus, g.node_bus)
    bus = np.where(inside(g, extent), local_bus, np.minimum(local_bus, _ports(g, group, extent) * g.network))
    rounds = np.where((group > 2) & (message_bytes > g.one_hop_bytes), 2.0, 1.0)
    alpha = rounds * g.bus_latency_s * (group / 4.0) ** g.bus_growth
    alpha = alpha + np.where(inside(g, extent), 0.0, 2 * np.ceil(extent / g.local) * g.network_latency_s)
    time = alpha + 2 * (group - 1) / group * (message_bytes + g.half_message_bytes) / bus
    return np.where(group > 1, time, 0.0)


def _ports(g: Grid, group: Array, extent: Array) -> Array:
    """Shares of a node's network that its members of a group use: one each, if they are the whole node or each has an
    adapter of its own. Several groups that meet on shared adapters use one adapter in one direction for each ring:
    two of eight devices are no faster than one (measured: docs/design/estimate.md)."""
    members = np.clip(group * g.local / np.maximum(extent, 1), 1, group)
    if np.all(g.devices_per_adapter == 1):
        return np.asarray(members)
    return np.where(members < g.local, np.maximum(members / g.devices_per_adapter, 1.0), members)


def half_reduce_s(g: Grid, group: Array, extent: Array, message_bytes: Array) -> Array:
    """Reduce-scatter or all-gather of `message_bytes` (the whole vector)."""
    return 0.5 * all_reduce_s(g, group, extent, message_bytes)


def hop_s(g: Grid, extent: Array, message_bytes: Array) -> Array:
    """One point-to-point transfer between pipeline neighbours; tp ranks send a part each where the stack splits it."""
    near = inside(g, extent)
    message_bytes = message_bytes / np.where((g.p2p_split > 0) | (g.sequence_parallel > 0), g.tp, 1.0)
    time = np.where(near, g.hop_s, g.network_latency_s + 1.3 * g.hop_s) + message_bytes / np.where(
        near, g.bus, g.network
    )
    return np.where(g.pp > 1, time, 0.0)


def tp_layer_s(g: Grid, tokens: Array) -> Array:
    """The two all-reduces of one layer in one direction (sequence parallelism: the same bytes in halves)."""
    return 2 * all_reduce_s(g, g.tp, g.tp, g.element_bytes * tokens * g.hidden)


def cp_layer_s(g: Grid, tokens: Array) -> Array:
    """Key/value exchange of one layer forward: a ring of blocks, or one all-to-all each way."""
    extent = g.tp * g.cp
    ring = (g.cp - 1) * g.element_bytes * 2 * tokens * g.kv_width / g.tp
    swap = (g.cp - 1) / g.cp * g.element_bytes * tokens * (2 * g.q_width + 2 * g.kv_width) / g.tp
    volume = np.where(g.cp_all_to_all > 0, swap, ring)
    bus = np.where(inside(g, extent), g.bus, g.network)
    return np.where(g.cp > 1, volume / bus + (g.cp - 1) * 2e-5, 0.0)


def ep_layer_s(g: Grid, tokens: Array) -> Array:
    """Dispatch and combine of one mixture layer in one direction."""
    extent = g.tp * g.cp * g.ep * np.where(g.dp_inside_pp > 0, 1, g.pp)
    bus = np.where(inside(g, extent), 0.6 * g.bus, g.network)
    volume = (g.ep - 1) / g.ep * g.element_bytes * tokens * g.experts_per_token * g.hidden / g.tp
    return np.where(g.ep > 1, 2 * (volume / bus + 6e-5), 0.0)


def dp_extent(g: Grid) -> Array:
    """Consecutive ranks over which a data-parallel (x context-parallel) group is spread."""
    return np.where(g.dp_inside_pp > 0, g.tp * g.cp * g.dp, g.tp * g.cp * g.pp * g.dp)


def pp_extent(g: Grid) -> Array:
    """Consecutive ranks over which two neighbouring stages are spread."""
    return np.where(g.dp_inside_pp > 0, g.tp * g.cp * g.dp * g.pp, g.tp * g.cp * g.pp)
