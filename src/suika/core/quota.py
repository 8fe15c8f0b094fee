"""`Quota`: what a tenant's jobs may hold together at most, and what they hold at least while they ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suika.core.cluster import Cluster
from suika.core.errors import SpecError, require

MOST = 1_000_000  # devices


@dataclass(frozen=True)
class Quota:
    """One tenant's two numbers.

    `guarantee` (devices) or `guarantee_nodes` (whole nodes: as many devices scattered over other nodes do not count):
    the tenant gets that much whenever its jobs ask for it, from whoever borrowed it. `max`: devices that it never
    exceeds (None: as many as others leave unused). A tenant without a quota borrows everything that it holds.
    """

    guarantee: int = 0
    guarantee_nodes: int = 0
    max: int | None = None

    def __post_init__(self) -> None:
        for name in ("guarantee", "guarantee_nodes", "max"):
            value = getattr(self, name)
            good = (name == "max" and value is None) or (type(value) is int and 0 <= value <= MOST)
            require(good, f"quota.{name}", value, f"must be a whole number, 0..{MOST}")
        both = self.guarantee > 0 and self.guarantee_nodes > 0
        require(not both, "quota.guarantee_nodes", self.guarantee_nodes, "stands beside `guarantee`", "give one")
        within = self.max is None or self.guarantee <= self.max
        require(within, "quota.max", self.max, f"is below the guarantee({self.guarantee})")

    @property
    def guarantees(self) -> bool:
        return self.guarantee > 0 or self.guarantee_nodes > 0

    def __str__(self) -> str:
        sure = f"{self.guarantee_nodes} whole nodes" if self.guarantee_nodes else f"{self.guarantee} devices"
        return f"{sure} guaranteed, {'no maximum' if self.max is None else f'at most {self.max}'}"

    def to_dict(self) -> dict[str, int | None]:
        return {"guarantee": self.guarantee, "guarantee_nodes": self.guarantee_nodes, "max": self.max}


def parse_quotas(found: Any, source: str = "quotas") -> dict[str, Quota]:
    """Quotas by tenant from a parsed file: `{team-a: 16}` (a maximum), or `{team-a: {guarantee: 8, max: 16}}`."""
    fix = "write e.g. {team-a: {guarantee: 8, max: 16}, team-b: {guarantee_nodes: 2}, team-c: 4}"
    require(isinstance(found, dict), source, found, "must map tenants to quotas", fix)
    quotas = {}
    for tenant, said in found.items():
        where = f"{source}.{tenant}"
        if type(said) is int:
            said = {"max": said}
        require(isinstance(said, dict), where, said, "is neither a number nor a mapping", fix)
        unknown = sorted(set(map(str, said)) - {"guarantee", "guarantee_nodes", "max"})
        require(not unknown, where, unknown, "unknown fields", fix)
        try:
            quotas[str(tenant)] = Quota(**said)
        except SpecError as error:
            raise SpecError(where, error.value, f"{error.field}: {error.problem}", error.fix or fix) from None
    return quotas


def checked_quota(said: Mapping[str, Any]) -> Quota:
    """One quota from plain data; fields that are left out are at their defaults."""
    unknown = sorted(set(said) - {"guarantee", "guarantee_nodes", "max"})
    require(not unknown, "quota", unknown, "unknown fields", "known: guarantee, guarantee_nodes, max")
    return Quota(**said)


def check_quotas(quotas: Mapping[str, Quota], cluster: Cluster) -> None:
    """Raise unless the cluster, all up and empty, could give everyone what is guaranteed at once."""
    sizes = sorted((node.num_devices for node in cluster.nodes), reverse=True)
    nodes = sum(quota.guarantee_nodes for quota in quotas.values())
    require(nodes <= len(sizes), "quotas", nodes, f"nodes are guaranteed, the cluster has {len(sizes)}")
    for tenant, quota in quotas.items():
        most, need = quota.max, sum(sizes[: quota.guarantee_nodes])
        fits = most is None or need <= most
        require(fits, f"quotas.{tenant}.max", most, f"is below the devices({need}) of its guaranteed nodes")
    devices, left = sum(quota.guarantee for quota in quotas.values()), sum(sizes[nodes:])
    problem = f"devices are guaranteed, the cluster has {left}" + (f" beside {nodes} whole nodes" if nodes else "")
    require(devices <= left, "quotas", devices, problem)
