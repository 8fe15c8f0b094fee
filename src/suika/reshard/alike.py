"""Moves that differ in names only are one move: nodes and devices are renumbered as they appear, so that predictions
made for some devices of a uniform cluster are found again for any others in the same arrangement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from suika.core.cluster import Cluster, Device, Node


def is_uniform(cluster: Cluster) -> bool:
    """Whether all nodes are alike and equally far from each other."""
    return len({(n.num_devices, n.domain_size, n.device_type, n.rack, n.pod) for n in cluster.nodes}) == 1


def renumbered(
    cluster: Cluster, old: Sequence[Device], new: Sequence[Device]
) -> tuple[Cluster, tuple[Device, ...], tuple[Device, ...]]:
    """A smallest cluster like the given uniform one, with both device lists in it. Same devices stay same, and so do
    shared nodes and domains; `new` comes back in walk order."""
    domain_size = cluster.nodes[0].domain_size
    nodes: dict[str, int] = {}
    domains: dict[tuple[str, int], int] = {}
    per_node: dict[str, int] = {}
    per_domain: dict[tuple[str, int], int] = {}
    known: dict[Device, Device] = {}
    for device in (*old, *sorted(new, key=cluster.position.__getitem__)):
        if device in known:
            continue
        node = nodes.setdefault(device.node, len(nodes))
        domain = (device.node, device.index // domain_size)
        if domain not in domains:
            domains[domain] = per_node[device.node] = per_node.get(device.node, -1) + 1
        per_domain[domain] = per_domain.get(domain, -1) + 1
        known[device] = Device(str(node), domains[domain] * domain_size + per_domain[domain])
    smallest = _like(cluster.nodes[0], frozenset(cluster.links.items()), len(nodes))
    return (
        smallest,
        tuple(known[device] for device in old),
        tuple(sorted((known[device] for device in new), key=smallest.position.__getitem__)),
    )


@lru_cache(maxsize=4096)
def _like(node: Node, links: frozenset, num_nodes: int) -> Cluster:  # type: ignore[type-arg]
    nodes = (Node(str(i), node.num_devices, node.device_type, node.domain_size) for i in range(num_nodes))
    return Cluster(tuple(nodes), dict(links))
