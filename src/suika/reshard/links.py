"""What a device gets through each level of the topology tree, as the resharder prices it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from suika.core.cluster import Cluster, Device, Link

# Per device and direction, where neither the cluster nor the caller says better: NVLink of an A100 generation inside a
# node, one 200 Gb/s adapter per device beyond it; for CPU devices gloo over loopback. Orders of magnitude matter here.
GPU_LINKS = {
    "domain": Link(200e9, 5e-6),
    "node": Link(50e9, 8e-6),
    "rack": Link(23e9, 15e-6),
    "pod": Link(23e9, 25e-6),
}
CPU_LINKS = dict.fromkeys(GPU_LINKS, Link(1.5e9, 100e-6))


@dataclass(frozen=True)
class Links:
    """Links between `devices` (the participants of a move, by index)."""

    cluster: Cluster
    devices: Sequence[Device]
    overrides: Mapping[str, Link] = field(default_factory=dict)

    @cached_property
    def node(self) -> list[int]:
        """Node number of each participant."""
        numbers: dict[str, int] = {}
        return [numbers.setdefault(device.node, len(numbers)) for device in self.devices]

    @cached_property
    def bytes_per_s(self) -> dict[str, float]:
        return {level: link.bandwidth_bytes_per_s for level, link in self._links.items()}

    @cached_property
    def _links(self) -> dict[str, Link]:
        cpu = all(node.device_type == "cpu" for node in self.cluster.nodes)
        return {**(CPU_LINKS if cpu else GPU_LINKS), **self.cluster.links, **self.overrides}

    @cached_property
    def _between_nodes(self) -> dict[tuple[str, str], float]:
        return {}

    def speed(self, a: int, b: int) -> float:
        """Bytes per second from participant `a` to `b`."""
        one, two = self.devices[a], self.devices[b]
        if one.node == two.node:
            return self.bytes_per_s[self.cluster.level(one, two)]
        pair = (one.node, two.node)
        known = self._between_nodes.get(pair)
        if known is None:
            known = self._between_nodes[pair] = self.bytes_per_s[self.cluster.level(one, two)]
        return known
