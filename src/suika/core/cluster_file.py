"""Cluster files: `{name?, nodes: [{name, devices, type, ...}], links?, device_types?}`, with their JSON Schema.

The models say what a file may hold; `Cluster` and `Node` hold the rules about what it means.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from suika.core.cluster import LARGEST, Cluster, Link, Node
from suika.core.errors import SpecError

Name = Annotated[str, Field(coerce_numbers_to_str=True)]
# What lies outside of these is in other units (FLOP/s for TFLOP/s, bytes for GB, Gb/s for bytes/s).
TeraFlops = Annotated[float, Field(ge=1e-6, le=1e6)]
GigaBytes = Annotated[float, Field(ge=1e-6, le=1e6)]
BytesPerS = Annotated[float, Field(ge=1, le=1e15)]
RatePrecision = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8", "nvfp4"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class NodeEntry(_Strict):
    """One node, or with `count: N` the N nodes `name0` .. `nameN-1`."""

    name: str
    devices: Annotated[int, Field(strict=True, ge=1, le=1024)]
    type: Annotated[str, Field(min_length=1)]
    domain_size: Annotated[int, Field(strict=True, ge=0)] = 0  # devices per NVLink domain; 0: all
    rack: Name = ""
    pod: Name = ""
    count: Annotated[int, Field(strict=True, ge=1, le=LARGEST)] | None = None

    def nodes(self) -> list[Node]:
        names = [self.name] if self.count is None else [f"{self.name}{k}" for k in range(self.count)]
        return [Node(n, self.devices, self.type, self.domain_size, self.rack, self.pod) for n in names]


class LinkEntry(_Strict):
    """What one device gets through a level, per direction."""

    bandwidth_bytes_per_s: BytesPerS
    latency_s: Annotated[float, Field(ge=0, le=3600)] = 0.0


class DeviceFacts(_Strict):
    """Facts that override the catalog's for a device type; `like` names the entry to start from."""

    like: str | None = None
    memory_gb: GigaBytes | None = None
    memory_gb_per_s: GigaBytes | None = None
    peak_tflops: dict[RatePrecision, TeraFlops] = {}


class ClusterFile(_Strict):
    """A cluster as an engineer writes it down."""

    name: Name = "cluster"
    nodes: Annotated[list[NodeEntry], Field(min_length=1)]
    links: dict[Literal["domain", "node", "rack", "pod"], LinkEntry] = {}
    device_types: dict[str, DeviceFacts] = {}


def cluster_from_dict(data: Any) -> Cluster:
    """A cluster file, parsed; raises `SpecError` that names the first wrong field, its value and the fix."""
    if not isinstance(data, dict):
        raise SpecError("cluster", data, "a cluster file must be a mapping with 'nodes'")
    try:
        file = ClusterFile.model_validate({key: value for key, value in data.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["cluster", *(str(part) for part in first["loc"] if part != "[key]")])
        raise SpecError(where, first.get("input"), first["msg"], _known(first["loc"], first["type"])) from None
    return Cluster(
        tuple(node for entry in file.nodes for node in entry.nodes()),
        {level: Link(link.bandwidth_bytes_per_s, link.latency_s) for level, link in file.links.items()},
        file.name,
        {name: facts.model_dump(exclude_unset=True) for name, facts in file.device_types.items()},
    )


def _known(place: tuple[int | str, ...], problem: str) -> str:
    """For a key that nobody knows: those that are known there."""
    if problem not in ("extra_forbidden", "invalid_key"):
        return ""
    models: dict[str, type[BaseModel]] = {"nodes": NodeEntry, "links": LinkEntry, "device_types": DeviceFacts}
    model = ClusterFile if len(place) == 1 else models[str(place[0])]
    return "known: " + ", ".join(model.model_fields)
