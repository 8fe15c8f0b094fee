"""A rank's process groups in one generation: built beside running ones, destroyed without a trace.

Nothing here touches the default process group: generations with other sizes and rank numbers live side by side in one
process. Only the pipeline group is registered with `torch.distributed`, because `torch.distributed.pipelining` looks
its peers up there. Every private name of torch that Suika needs for that (version 2.13) is used in this file alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from suika.core.mesh import Mesh
from suika.runtime.program import RankGroups

ADDRESS, LOOPBACK = "SUIKA_ADDRESS", "127.0.0.1"  # the variable in which a node says where others reach its ranks
_GLOO = dist.ProcessGroup.BackendType.GLOO


def build_groups(
    store: dist.Store, prefix: str, mesh: Mesh, rank: int, timeout_s: float, host: str | None = None
) -> RankGroups:
    """The groups of `rank`, over gloo. May run in a side thread while other groups are in use.

    Blocks until every rank of `mesh` has built its groups, at most `timeout_s` (also the timeout of each later
    operation); raises `RuntimeError` when a peer does not show up. `prefix` must be new for each generation of a job:
    it keeps the store's keys apart. `host` is an address of this machine that all peers can reach (by
    default SUIKA_ADDRESS, else loopback);
    GLOO_SOCKET_IFNAME names an interface instead.
    """
    replicas = mesh.replicas(rank)
    apart, first = mesh.layout.ep, replicas.index(rank) // mesh.layout.ep * mesh.layout.ep
    axes: dict[str, tuple[int, ...]] = {
        "world": tuple(range(mesh.num_ranks)),
        "tp": mesh.group(rank, "tp"),
        "pp": mesh.group(rank, "pp"),
        "cp": mesh.group(rank, "cp"),
        "dp": replicas,
        "ep": replicas[first : first + apart],
        "expert_dp": replicas[replicas.index(rank) % apart :: apart] if apart > 1 else (rank,),
        "ends": _ends(mesh, rank),
    }
    device = _network_device(host)
    built: dict[str, dist.ProcessGroup | None] = {}
    # All ranks build their axes in this one order, and the groups of one axis are disjoint: no wait can be circular.
    for axis, ranks in axes.items():
        built[axis] = None
        if len(ranks) > 1:
            name = f"{prefix}/{axis}/{ranks[0]}"
            built[axis] = _gloo_group(store, name, ranks.index(rank), len(ranks), timeout_s, device)
    if built["pp"] is not None:
        _register(built["pp"], store, axes["pp"])
    return RankGroups(**built)


def build_group(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float, host: str | None = None
) -> dist.ProcessGroup:
    """One group of `size` processes under a `name` that is used once, e.g. a move's. Blocks like `build_groups`."""
    return _gloo_group(store, name, rank, size, timeout_s, _network_device(host))


def build_nccl_group(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float, device: torch.device
) -> dist.ProcessGroup:
    """One NCCL group, one device per rank, under a `name` that is used once."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    here = dist.PrefixStore(name, store)
    backend = dist.ProcessGroupNCCL(here, rank, size, options)
    group = dist.ProcessGroup(here, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_group_name(c10d.GroupName(f"{name}#{rank}"))
    return group


def destroy(groups: RankGroups) -> None:
    """Close every connection and forget the groups. Threads and descriptors go with the last reference."""
    for field in reversed(fields(groups)):
        group: dist.ProcessGroup | None = getattr(groups, field.name)
        if group is None:
            continue
        if group in c10d._world.pg_map:
            _unregister(group)
        group.shutdown()


def _ends(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """First and last stage of the rank's pipeline, if it is one of the two; else the rank alone."""
    pipeline = mesh.group(rank, "pp")
    ends = (pipeline[0], pipeline[-1])
    return ends if mesh.layout.pp > 1 and rank in ends else (rank,)


def _network_device(host: str | None) -> object:
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        return dist.ProcessGroupGloo.create_device(interface=interface)
    return dist.ProcessGroupGloo.create_device(hostname=host or os.environ.get(ADDRESS, LOOPBACK))


def _gloo_group(
    store: dist.Store, name: str, rank: int, size: int, timeout_s: float, device: object
) -> dist.ProcessGroup:
    """One gloo group. One thread serves it, so that its collectives run in the order in which they were issued."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._devices = [device]
    options._threads = 1
    options._timeout = timedelta(seconds=timeout_s)
    here = dist.PrefixStore(name, store)
    backend = dist.ProcessGroupGloo(here, rank, size, options)
    group = dist.ProcessGroup(here, rank, size)
    group._set_default_backend(_GLOO)
    group._register_backend(torch.device("cpu"), _GLOO, backend)
    group._set_group_name(c10d.GroupName(f"{name}#{rank}"))
    return group


def _register(group: dist.ProcessGroup, store: dist.Store, ranks: Sequence[int]) -> None:
    """Let `torch.distributed` resolve this group's peers: generation rank -> rank in the group."""
    mapping = {rank: place for place, rank in enumerate(ranks)}
    c10d._register_pg_in_world(group, "gloo", store, group.group_name, "cpu:gloo", rank_mapping=mapping)


def _unregister(group: dist.ProcessGroup) -> None:
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_coalesce_state):
        table.pop(group, None)
    tag = world.pg_to_tag.pop(group, None)
    if tag is not None:
        world.tags_to_pg.pop(tag, None)
    c10d._unregister_process_group(group.group_name)
