"""The topology tree: device < NVLink domain < node < rack < pod, built once, read-only."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from suika.core.device_names import plain, same_type
from suika.core.errors import SpecError, require

LARGEST = 100_000  # nodes
LEVELS = ("domain", "node", "rack", "pod")  # narrowest first; "pod" stands for anything wider too
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


class Device(NamedTuple):
    """One accelerator; written `node/index`."""

    node: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs

    def __str__(self) -> str:
        return f"{self.node}/{self.index}"

    @staticmethod
    def parse(text: str) -> Device:
        node, slash, index = text.rpartition("/")
        require(bool(slash) and index.isdecimal(), "device", text, "must be node/index")
        return Device(node, int(index))


@dataclass(frozen=True)
class Link:
    """What one device gets through a level of the tree, per direction."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        bandwidth, latency_s = self.bandwidth_bytes_per_s, self.latency_s
        require(0 < bandwidth < math.inf, "link.bandwidth_bytes_per_s", bandwidth, "must be > 0 and finite")
        require(0 <= latency_s < math.inf, "link.latency_s", latency_s, "must be >= 0 and finite")


@dataclass(frozen=True)
class Node:
    """Devices of one type in one machine; `domain_size` of them share an NVLink domain (0: all)."""

    name: str
    num_devices: int
    device_type: str
    domain_size: int = 0
    rack: str = ""
    pod: str = ""

    def __post_init__(self) -> None:
        ok = isinstance(self.name, str) and bool(_NAME.fullmatch(self.name))
        require(ok, "node.name", self.name, "must be 1-63 letters, digits, '.', '_' or '-'")
        require(0 < self.num_devices <= 1024, "node.num_devices", self.num_devices, "must be between 1 and 1024")
        if not self.domain_size:
            object.__setattr__(self, "domain_size", self.num_devices)
        require(self.domain_size > 0, "node.domain_size", self.domain_size, "must be > 0")

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(Device(self.name, i) for i in range(self.num_devices))


@dataclass(frozen=True)
class Domain:
    """A set of devices that share a level of the tree, e.g. one NVLink domain or one rack."""

    level: str
    name: str
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Cluster:
    """All nodes, in depth-first order of the tree; `links` override the device catalog's per level."""

    nodes: tuple[Node, ...]
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    name: str = "cluster"
    # Facts that replace the device catalog's: type -> {like, memory_gb, memory_gb_per_s, peak_tflops}.
    device_types: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        require(not twice, "cluster.nodes", twice, "node names must be unique")
        for level in self.links:
            require(level in LEVELS, "cluster.links", level, f"unknown level; known: {', '.join(LEVELS)}")
        # Depth-first walk of the tree: pods and racks keep the order in which they first appear.
        pods: dict[str, int] = {}
        racks: dict[tuple[str, str], int] = {}
        for node in self.nodes:
            pods.setdefault(node.pod, len(pods))
            racks.setdefault((node.pod, node.rack), len(racks))
        walked = sorted(self.nodes, key=lambda n: (pods[n.pod], racks[n.pod, n.rack]))
        object.__setattr__(self, "nodes", tuple(walked))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device, in walk order: neighbours in this list are neighbours in the tree."""
        return tuple(device for node in self.nodes for device in node.devices)

    @cached_property
    def position(self) -> Mapping[Device, int]:
        """Index of each device in `devices`."""
        return {device: i for i, device in enumerate(self.devices)}

    @cached_property
    def node_of(self) -> Mapping[str, Node]:
        return {node.name: node for node in self.nodes}

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @cached_property
    def _types(self) -> tuple[str, ...]:
        """Of its nodes, each once."""
        return tuple(dict.fromkeys(node.device_type for node in self.nodes))

    def types_named(self, name: str) -> tuple[str, ...]:
        """What nodes call the device type `name`; empty where no node has it. Any of a type's names will do, but a type
        of which this cluster has facts of its own is another one, with that name alone."""
        own = tuple(t for t in self._types if t in self.device_types and plain(t) == plain(name))
        return own or tuple(t for t in self._types if t not in self.device_types and same_type(t, name))

    def facts_of(self, device_type: str) -> Mapping[str, Any] | None:
        """What this cluster says itself of a type of its nodes, by whatever name it does."""
        if device_type in self.device_types:
            return self.device_types[device_type]
        others = (name for name in self.device_types if name not in self._types)
        named = (self.device_types[name] for name in others if same_type(name, device_type))
        return next(named, None)

    def domains(self) -> tuple[Domain, ...]:
        """The NVLink domains, in walk order."""
        found = []
        for node in self.nodes:
            for start in range(0, node.num_devices, node.domain_size):
                part = node.devices[start : start + node.domain_size]
                found.append(Domain("domain", f"{node.name}/{start // node.domain_size}", part))
        return tuple(found)

    def level(self, a: Device, b: Device) -> str:
        """The narrowest level of the tree that holds both devices."""
        one, two = self.node_of[a.node], self.node_of[b.node]
        if a.node == b.node:
            return "domain" if a.index // one.domain_size == b.index // one.domain_size else "node"
        return "rack" if (one.pod, one.rack) == (two.pod, two.rack) else "pod"

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "nodes": [
                {
                    "name": n.name,
                    "devices": n.num_devices,
                    "type": n.device_type,
                    "domain_size": n.domain_size,
                    "rack": n.rack,
                    "pod": n.pod,
                }
                for n in self.nodes
            ],
            "links": {
                level: {"bandwidth_bytes_per_s": link.bandwidth_bytes_per_s, "latency_s": link.latency_s}
                for level, link in self.links.items()
            },
            **({"device_types": {k: dict(v) for k, v in self.device_types.items()}} if self.device_types else {}),
        }


_SHORT = re.compile(r"(\d+)x(\d+):([A-Za-z0-9._-]+)")


def parse_cluster_shorthand(text: str) -> Cluster:
    """`NODESxDEVICES:TYPE`, e.g. `8x8:A800`."""
    match = _SHORT.fullmatch(text.strip())
    if match is None:
        raise SpecError("cluster", text, "not NODESxDEVICES:TYPE", "write e.g. 8x8:A800, or give a YAML file")
    num_nodes, num_devices, device_type = int(match[1]), int(match[2]), match[3]
    require(0 < num_nodes <= LARGEST, "cluster", text, f"needs between 1 and {LARGEST} nodes")
    width = len(str(num_nodes - 1))
    return Cluster(tuple(Node(f"n{i:0{width}}", num_devices, device_type) for i in range(num_nodes)), name=text)
