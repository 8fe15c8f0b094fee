"""Which rank runs on which device, and which devices a shrink keeps, so that the least state moves.

inbound[d, r] = bytes that device d lacks of what new rank r holds. Their minimum-sum assignment is the least that any
placement can move (`bound_bytes`); the bottleneck assignment is the smallest possible largest inbound
(`worst_rank_bound_bytes`). Placements keep each tensor-parallel group inside one NVLink domain (or node) whenever one
exists, so they are found on two levels: groups onto domains, then ranks onto the devices inside. Among placements that
move (almost) the least, the one with the least-loaded worst device wins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import get_args

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

from suika.core.cluster import Cluster, Device
from suika.core.errors import require
from suika.core.layout import Layout, ZeroBuckets
from suika.core.mesh import DEFAULT_ORDER
from suika.core.plan import Plan
from suika.reshard.cells import groups_of
from suika.reshard.state import JobShape

BENDS = (0.3, 3.0)  # how much a large inbound is worth avoiding
CLOSE = 1.002  # near enough to the exact bound to stop looking
FAIR = 1.05  # near enough to the exact worst-device bound
SLACK = 1.01  # how much more than the least may move for a better worst device
TIE = 1e-6  # weight of walk order among equals, as a share of all bytes


def assign(
    shape: JobShape,
    old: Plan,
    new: Layout,
    devices: Sequence[Device],
    cluster: Cluster,
    order: tuple[str, ...] = DEFAULT_ORDER,
) -> tuple[Device, ...]:
    """Devices of the new ranks, in rank order, such that the least bytes move.

    With more `devices` than ranks the best are chosen. Raises `SpecError` when there are too few.
    """
    num_ranks = new.num_ranks
    require(len(devices) >= num_ranks, "devices", len(devices), f"layout {new} needs {num_ranks} devices")
    walk = tuple(sorted(devices, key=cluster.position.__getitem__))
    inbound = inbound_bytes(shape, old, new, walk, order)
    chosen = _TwoLevel(inbound, walk, cluster, _tp_groups(new, order)).solve()
    return tuple(walk[d] for d in chosen)


def choose_devices(
    shape: JobShape, old: Plan, new: Layout, cluster: Cluster, candidates: Sequence[Device] | None = None
) -> tuple[Device, ...]:
    """The devices a smaller layout keeps (of `candidates`, by default the old ones), in rank order, by covered bytes.

    What is not returned is what the shrink frees.
    """
    return assign(shape, old, new, old.devices if candidates is None else candidates, cluster)


def assign_freely(
    shape: JobShape, old: Plan, new: Layout, devices: Sequence[Device], cluster: Cluster
) -> tuple[Layout, tuple[Device, ...]]:
    """`assign`, with the shape of ZeRO buckets free as well: the new layout with the one that moves less.

    On a tie the old layout's shape stays.
    """
    shapes = sorted(get_args(ZeroBuckets), key=lambda buckets: buckets != old.layout.zero_buckets)
    choices = []
    for buckets in shapes if new.zero else shapes[:1]:
        layout = replace(new, zero_buckets=buckets)
        chosen = assign(shape, old, layout, devices, cluster)
        choices.append((int(inbound_bytes(shape, old, layout, chosen).trace()), layout, chosen))
    _, layout, chosen = min(choices, key=lambda choice: choice[0])
    return layout, chosen


def inbound_bytes(
    shape: JobShape, old: Plan, new: Layout, devices: Sequence[Device], order: tuple[str, ...] = DEFAULT_ORDER
) -> np.ndarray:
    """[device, new rank] -> bytes of the rank's state that the device does not hold."""
    overlap, need = _overlap(shape, old.layout, new, old.order, order)
    rank_of = {device: rank for rank, device in enumerate(old.devices)}
    inbound = np.broadcast_to(need, (len(devices), len(need))).copy()
    staying = [i for i, device in enumerate(devices) if device in rank_of]
    inbound[staying] -= overlap[[rank_of[devices[i]] for i in staying]]
    return inbound


@lru_cache(maxsize=16)  # 8 MB each at 1,024 ranks
def _overlap(
    shape: JobShape, old: Layout, new: Layout, old_order: tuple[str, ...], new_order: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Bytes common to each (old rank, new rank), and bytes of each new rank."""
    overlap = np.zeros((old.num_ranks, new.num_ranks), dtype=np.int64)
    need = np.zeros(new.num_ranks, dtype=np.int64)
    single: list[tuple[int, int, int]] = []
    for group in groups_of(shape, old, new, old_order, new_order):
        if len(group.old) == len(group.new) == 1:
            single.append((group.old[0], group.new[0], group.num_bytes))
        else:
            overlap[np.ix_(group.old, group.new)] += group.num_bytes
            need[list(group.new)] += group.num_bytes
    i, j, num_bytes = np.array(single, dtype=np.int64).reshape(-1, 3).T
    np.add.at(overlap, (i, j), num_bytes)
    np.add.at(need, j, num_bytes)
    return overlap, need


def bound_bytes(inbound: np.ndarray) -> int:
    """The least total that any placement on these devices moves (exact)."""
    return int(inbound[linear_sum_assignment(inbound)].sum())


def worst_rank_bound_bytes(inbound: np.ndarray) -> int:
    """The least possible largest inbound of any placement on these devices (exact): a search over matchings."""
    values = np.unique(inbound)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if _all_within(inbound, values[middle]):
            high = middle
        else:
            low = middle + 1
    return int(values[low])


def _all_within(inbound: np.ndarray, limit: float) -> bool:
    """Whether some placement gives no device more than `limit`."""
    matched = maximum_bipartite_matching(csr_array((inbound <= limit).T), perm_type="column")
    return bool((matched >= 0).all())


def _tp_groups(layout: Layout, order: tuple[str, ...]) -> np.ndarray:
    """[group, tp rank] -> rank, groups in rank order."""
    ranks = np.arange(layout.num_ranks).reshape([getattr(layout, axis) for axis in order])
    groups = np.moveaxis(ranks, order.index("tp"), -1).reshape(-1, layout.tp)
    return groups[np.argsort(groups[:, 0])]


@dataclass
class _TwoLevel:
    """Tensor-parallel groups onto pools of devices, then ranks onto devices inside each pool.

    A pool of several groups' size (a node, a domain) leaves the inner choice open but prices each group as if it were
    alone there; blocks of one group's size price exactly but fix which devices belong together. Both are tried, then
    the blocks that came out are dealt again until nothing improves.
    """

    inbound: np.ndarray  # [device, rank]
    walk: Sequence[Device]
    cluster: Cluster
    groups: np.ndarray  # [group, tp rank] -> rank

    def solve(self) -> np.ndarray:
        """Device index of each rank."""
        bound = bound_bytes(self.inbound)
        cost = self.inbound.astype(np.float64)
        found, least = np.empty(0, dtype=int), -1
        for pools in self._partitions():
            devices = self._improved(cost, self._place(cost, pools), bound)
            total = self._total(devices)
            if least < 0 or total < least:
                found, least = devices, total
            if least <= CLOSE * bound:
                break
        return self._spare_the_worst(cost, found, least)

    def _improved(self, cost: np.ndarray, devices: np.ndarray, bound: int) -> np.ndarray:
        """Deal the groups' device sets again, exactly priced, until that brings nothing."""
        total = self._total(devices)
        while total > CLOSE * bound:
            again = self._place(cost, [sorted(devices[group].tolist()) for group in self.groups])
            if self._total(again) >= total:
                break
            devices, total = again, self._total(again)
        return devices

    def _spare_the_worst(self, cost: np.ndarray, devices: np.ndarray, least: int) -> np.ndarray:
        """Of placements that move nearly the least, one whose worst device takes in less: costs outgrow bytes."""
        worst = self._worst(devices)
        blocks = [sorted(devices[group].tolist()) for group in self.groups]
        for bend in BENDS:
            if not _all_within(self.inbound, (worst - 1) / FAIR):
                break
            bent = cost + bend * cost * cost / cost.max(initial=1.0)
            for pools in (blocks, self._pools()):
                other = self._place(bent, pools)
                if self._total(other) <= SLACK * least and self._worst(other) < worst:
                    devices, worst = other, self._worst(other)
        return devices

    def _total(self, devices: np.ndarray) -> int:
        return int(self.inbound[devices, np.arange(len(devices))].sum())

    def _worst(self, devices: np.ndarray) -> int:
        return int(self.inbound[devices, np.arange(len(devices))].max())

    def _place(self, cost: np.ndarray, pools: list[list[int]]) -> np.ndarray:
        """Device of each rank: groups onto slots of the pools by their least cost there, then ranks inside each."""
        num_groups, tp = self.groups.shape
        slots = [pool for pool, members in enumerate(pools) for _ in range(len(members) // tp)]
        spare = max(num_groups - len(slots), 0)  # groups that must span pools: nothing of them is sure to stay
        spanning = np.repeat(cost[:, self.groups].max(axis=0).sum(axis=1)[:, None], spare, axis=1)
        table = np.hstack([self._group_costs(cost, pools)[:, slots], spanning])
        held: dict[int, list[int]] = {}
        for group, slot in zip(*linear_sum_assignment(table + _walk_order(table)), strict=True):
            held.setdefault(slots[slot] if slot < len(slots) else -1, []).append(int(group))
        placed = np.full(self.groups.size, -1)
        for pool, groups in sorted(held.items(), reverse=True):  # the spanning ones (-1) take what is left
            free = np.array(pools[pool]) if pool >= 0 else np.setdiff1d(np.arange(len(self.walk)), placed)
            ranks = self.groups[groups].reshape(-1)
            part = cost[np.ix_(free, ranks)]
            rows, columns = linear_sum_assignment(part + _walk_order(part))
            placed[ranks[columns]] = free[rows]
        return placed

    def _group_costs(self, cost: np.ndarray, pools: list[list[int]]) -> np.ndarray:
        """[group, pool] -> least cost of the group by itself on the pool's devices.

        Where each rank's best device is another one, that is the sum of the best; only the rest needs an assignment.
        """
        num_groups, tp = self.groups.shape
        costs = np.zeros((num_groups, len(pools)))
        by_size: dict[int, list[int]] = {}
        for pool, members in enumerate(pools):
            by_size.setdefault(len(members), []).append(pool)
        for size, alike in by_size.items():
            if size < tp:
                continue
            block = cost[np.array([pools[pool] for pool in alike])][:, :, self.groups]  # pool, device, group, tp rank
            best = block.min(axis=1)
            costs[:, alike] = best.sum(axis=2).T
            choice = np.sort(block.argmin(axis=1), axis=2)
            contested = (choice[:, :, 1:] == choice[:, :, :-1]).any(axis=2) & (best < block.max(axis=1)).any(axis=2)
            for pool, group in np.argwhere(contested):
                part = block[pool, :, group]
                costs[group, alike[pool]] = part[linear_sum_assignment(part)].sum()
        return costs

    def _partitions(self) -> Iterator[list[list[int]]]:
        """Ways to divide the devices: pools; neighbours together; and every k-th device of a pool together, which is
        where the parts of a wider tensor-parallel group lie."""
        tp, pools = self.groups.shape[1], self._pools()
        yield pools
        if any(len(members) >= 2 * tp for members in pools):
            yield [members[i : i + tp] for members in pools for i in range(0, len(members), tp)]
            yield [members[i :: len(members) // tp][:tp] for members in pools for i in range(len(members) // tp)]

    def _pools(self) -> list[list[int]]:
        """Devices by NVLink domain where a tensor-parallel group fits in one, else by node, else all together."""
        tp = self.groups.shape[1]
        if tp == 1:
            return [list(range(len(self.walk)))]
        for key in (self._domain, lambda device: device.node):
            pools: dict[object, list[int]] = {}
            for i, device in enumerate(self.walk):
                pools.setdefault(key(device), []).append(i)
            if any(len(members) >= tp for members in pools.values()):
                return list(pools.values())
        return [list(range(len(self.walk)))]

    def _domain(self, device: Device) -> object:
        return device.node, device.index // self.cluster.node_of[device.node].domain_size


def _walk_order(cost: np.ndarray) -> np.ndarray:
    """Tiny costs that put equals in walk order: neighbours in rank order are then neighbours in the tree."""
    rows, columns = np.ogrid[: cost.shape[0], : cost.shape[1]]
    size = max(cost.shape)
    return TIE * cost.max(initial=0.0) / size**2 * (rows - columns) ** 2
