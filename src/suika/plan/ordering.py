"""Devices in one linear order (the depth-first walk of the topology tree), as integers and numpy arrays.

`Cluster` already lists its nodes and devices in walk order, so a device's position in that list is its number here:
neighbours in number are neighbours in the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cache

import numpy as np

from suika.core.cluster import Cluster


class Fabric:
    """The static topology as arrays; N nodes, D devices. Read-only once built."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.devices = cluster.devices
        self.position = cluster.position
        nodes = cluster.nodes
        self.num_nodes, self.num_devices = len(nodes), len(self.devices)
        self.size = np.array([node.num_devices for node in nodes], dtype=np.int32)  # [N]
        self.first = np.concatenate(([0], np.cumsum(self.size)[:-1])).astype(np.int32)  # [N] first device of a node
        self.node_of = np.repeat(np.arange(self.num_nodes, dtype=np.int32), self.size)  # [D]
        self.node_number = {node.name: i for i, node in enumerate(nodes)}
        domain_size = np.array([node.domain_size for node in nodes], dtype=np.int64)
        within = np.arange(self.num_devices) - self.first[self.node_of]
        # Any number that differs between domains will do: node number, then domain within the node.
        self.domain_of = self.node_of.astype(np.int64) * 1024 + within // domain_size[self.node_of]  # [D]
        self.types = tuple(dict.fromkeys(node.device_type for node in nodes))
        kind = {name: i for i, name in enumerate(self.types)}
        self.type_of = np.array([kind[node.device_type] for node in nodes], dtype=np.int16)  # [N]
        self.num_nodes_of_type = np.bincount(self.type_of, minlength=len(self.types))

    @cache  # noqa: B019  (fabrics are few and live as long as their cluster)
    def sizes_of(self, device_type: str) -> tuple[int, ...]:
        """Sizes of the nodes with `device_type` ("" = any), descending."""
        return tuple(sorted((int(s) for s in self.size[self.has_type(device_type)]), reverse=True))

    def has_type(self, device_type: str) -> np.ndarray:
        """Mask over nodes of those with `device_type` ("" = any)."""
        if not device_type:
            return np.ones(self.num_nodes, dtype=bool)
        if device_type not in self.types:
            return np.zeros(self.num_nodes, dtype=bool)
        return self.type_of == self.types.index(device_type)


_fabrics: OrderedDict[int, Fabric] = OrderedDict()


def fabric(cluster: Cluster) -> Fabric:
    """The fabric of `cluster`; the last few are remembered (a cluster is compared by identity, hashing it is slow)."""
    found = _fabrics.get(id(cluster))
    if found is None or found.cluster is not cluster:
        found = _fabrics[id(cluster)] = Fabric(cluster)
        while len(_fabrics) > 16:
            _fabrics.popitem(last=False)
    return found
