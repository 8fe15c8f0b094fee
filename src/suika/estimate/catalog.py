"""Device types: peak rates, memory and links, each with its source. What a device reaches is in `curves`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files

from suika.core.cluster import Cluster, Link
from suika.core.device_names import canonical
from suika.core.errors import SpecError, require

GB, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclass(frozen=True)
class DeviceType:
    """One accelerator model. Rates are dense peaks per device; links are per device and direction."""

    name: str
    generation: str  # devices of one generation share efficiency curves
    peak_flops: Mapping[str, float] = field(hash=False)  # precision -> FLOP/s
    memory_bytes: float
    memory_bytes_per_s: float
    num_units: int  # streaming multiprocessors, compute units or cores
    devices_per_node: int
    domain_size: int  # devices that share one fast domain; may span nodes (NVL72)
    links: Mapping[str, Link] = field(hash=False)
    source: str

    def peak(self, precision: str) -> float:
        """FLOP/s of `precision`; a precision the device lacks runs at the nearest wider one it has."""
        for name in (precision, *_WIDER.get(precision, ())):
            if name in self.peak_flops:
                return self.peak_flops[name]
        raise SpecError("precision", precision, f"{self.name} has no rate for it", f"known: {', '.join(PRECISIONS)}")


PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4")
_WIDER = {
    "nvfp4": ("mxfp8", "fp8", "bf16"),
    "mxfp8": ("fp8", "bf16"),
    "fp8": ("bf16",),
    "fp16": ("bf16",),
    "bf16": ("fp16", "fp32"),
    "tf32": ("fp32",),
    "fp64": ("fp32",),
}


@dataclass(frozen=True)
class Wiring:
    """The part of a topology that a price depends on: how many devices sit together, and what each level carries."""

    devices_per_node: int
    domain_size: int
    domain: Link
    node: Link  # between domains of one node
    network: Link  # between nodes, per device
    devices_per_adapter: float = 1.0  # that share one network adapter

    @staticmethod
    def of(device: DeviceType, cluster: Cluster | None = None) -> Wiring:
        """The catalog's wiring of `device`, overridden by what `cluster` says of such nodes and of its links."""
        per_node, domain, links = device.devices_per_node, device.domain_size, dict(device.links)
        if cluster is not None:
            types = {node.device_type for node in cluster.nodes}  # few, of many nodes
            same = {name for name in types if is_known(name, cluster) and device_type(name, cluster) == device}
            mine = [node for node in cluster.nodes if node.device_type in same]
            require(bool(mine), "device_type", device.name, "the cluster has no node of this type")
            per_node = max(node.num_devices for node in mine)
            # A domain wider than a node (NVL72) is a fact of the device type: the cluster only names trays.
            if device.domain_size <= device.devices_per_node:
                domain = min(max(node.domain_size for node in mine), per_node)
            links.update(cluster.links)
        network = links["rack"] if "rack" in links else links["pod"]
        return Wiring(per_node, domain, links["domain"], links["node"], network)


def device_type(name: str, cluster: Cluster | None = None) -> DeviceType:
    """The type called `name`, with what the cluster's own file says of it."""
    said = cluster.facts_of(name) if cluster is not None else None
    if said is None:
        return resolve(name)
    base = resolve(str(said.get("like", name)))
    peaks = {precision: rate * TERA for precision, rate in said.get("peak_tflops", {}).items()}
    return replace(
        base,
        name=name,
        peak_flops={**base.peak_flops, **peaks},
        memory_bytes=said.get("memory_gb", base.memory_bytes / GB) * GB,
        memory_bytes_per_s=said.get("memory_gb_per_s", base.memory_bytes_per_s / GB) * GB,
        source=f"the cluster file, else {base.name}",
    )


def is_known(name: str, cluster: Cluster | None = None) -> bool:
    """Whether anything can be predicted of the type called `name`."""
    try:
        device_type(name, cluster)
    except SpecError:
        return False
    return True


@cache
def device_types() -> Mapping[str, DeviceType]:
    """The catalog, by canonical name."""
    data = json.loads((files("suika.estimate") / "data" / "devices.json").read_text())
    return {name: _parse(name, row) for name, row in data["devices"].items()}


def _parse(name: str, row: dict) -> DeviceType:  # type: ignore[type-arg]
    links = {k: Link(v["gb_per_s"] * GB, v["latency_us"] * MICRO) for k, v in row["links"].items()}
    return DeviceType(
        name,
        row["generation"],
        {precision: value * TERA for precision, value in row["peak_tflops"].items()},
        row["memory_gb"] * GB,
        row["memory_gb_per_s"] * GB,
        row["num_units"],
        row["devices_per_node"],
        row["domain_size"],
        links,
        row["source"],
    )


@cache
def resolve(name: str) -> DeviceType:
    """The device type called `name` (any spelling or alias). Raises `SpecError` naming the nearest known ones."""
    found = canonical(name)
    if found is None:
        near = difflib.get_close_matches(name.upper(), [n.upper() for n in device_types()], n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise SpecError("device_type", name, "unknown device type", f"{hint}known: {', '.join(device_types())}")
    return device_types()[found]
