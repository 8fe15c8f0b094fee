"""`Placement`, `Estimate` and `Plan`. A plan is validated once, totally; executors never re-derive it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from suika.core.cluster import Cluster, Device
from suika.core.errors import require
from suika.core.layout import Layout, check_layout
from suika.core.mesh import DEFAULT_ORDER, Mesh
from suika.core.model import ModelSpec


@dataclass(frozen=True)
class Placement:
    """rank -> device: rank r runs on `devices[r]`."""

    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        require(len(self.devices) > 0, "placement", [], "needs at least one device")
        distinct = len(set(self.devices)) == len(self.devices)
        require(distinct, "placement", [str(d) for d in self.devices], "names a device twice")


@dataclass(frozen=True)
class Estimate:
    """What a plan is predicted to cost. `parts_s` sums to `step_s`; `memory_parts_bytes` is the worst rank's."""

    step_s: float
    step_p10_s: float
    step_p90_s: float
    parts_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    peak_bytes: tuple[int, ...] = ()  # per pipeline stage
    peak_p90_bytes: int = 0
    memory_parts_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Plan:
    """Layout + placement (+ estimate) of one job. Build through `Plan.checked`."""

    layout: Layout
    placement: Placement
    estimate: Estimate | None = field(default=None, compare=False, hash=False)
    order: tuple[str, ...] = DEFAULT_ORDER

    @staticmethod
    def checked(
        layout: Layout,
        devices: tuple[Device, ...],
        model: ModelSpec,
        global_batch: int,
        sequence_length: int,
        cluster: Cluster,
        estimate: Estimate | None = None,
    ) -> Plan:
        """The one validation of a plan. Raises `SpecError` with the arithmetic."""
        check_layout(layout, model, global_batch, sequence_length)
        require(
            layout.num_ranks == len(devices),
            "layout",
            str(layout),
            f"tp({layout.tp}) * pp({layout.pp}) * dp({layout.dp}) * cp({layout.cp}) != devices({len(devices)})",
        )
        unknown = [str(d) for d in devices if d not in cluster.position]
        require(not unknown, "placement", unknown, "not in the cluster")
        return Plan(layout.resolve(model), Placement(tuple(devices)), estimate)

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.layout, self.order)

    @property
    def devices(self) -> tuple[Device, ...]:
        return self.placement.devices

    def to_dict(self) -> dict[str, Any]:
        return {
            "layout": self.layout.to_dict(),
            "devices": [str(d) for d in self.devices],
            "order": list(self.order),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Plan:
        devices = tuple(Device.parse(text) for text in data["devices"])
        return Plan(Layout.from_dict(data["layout"]), Placement(devices), order=tuple(data["order"]))

    @property
    def digest(self) -> str:
        """Stable across processes: every message of a move carries it."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
