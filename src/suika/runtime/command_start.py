"""How a command comes up: a place for every rank, set-up commands, then all start, knowing where the others are."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from suika.core.cluster import Device
from suika.core.job import JobSpec
from suika.runtime.gang import COMMAND_ENTRY, Gang, Member

_SET_UP_S = 3600.0


def spawn(gang: Gang, spec: JobSpec, generation: int, device: Device) -> Member:
    """The process that stands before the command of one rank."""
    fields = spec.model_dump(mode="json")
    launch = {name: fields[name] for name in ("command", "environment")}
    launch |= {"job_id": gang.job_id, "generation": generation, "outage_s": spec.outage_s}
    return gang.spawn(f"{gang.job_id}.{generation}.{device}", device.node, device, COMMAND_ENTRY, launch)


def bring_up(
    gang: Gang, spec: JobSpec, generation: int, ranks: Mapping[Device, Member], check: Callable[[], None]
) -> None:
    """Returns once the command runs on all `ranks`, which are in their order. Raises as `Gang.gather` does."""
    members = list(ranks.values())
    first = gang.gather("place", generation, members, gang.limits.launch_s, check)[0]
    variables = rank_variables(gang.job_id, generation, tuple(ranks), first["host"], first["port"])
    given = dict(zip(members, variables, strict=True))
    if spec.environment.setup:
        firsts = [member for member in members if given[member]["LOCAL_RANK"] == "0"]
        for member in firsts:
            gang.tell([member], "setup", variables=given[member])
        gang.gather("set-up", generation, firsts, _SET_UP_S, check)
    for member in members:
        gang.tell([member], "start", variables=given[member])
    gang.gather("running", generation, members, gang.limits.launch_s, check)


def rank_variables(
    job_id: str, generation: int, devices: tuple[Device, ...], host: str, port: int
) -> list[dict[str, str]]:
    """What torchrun would give to each rank. Ranks are in the order of `devices`, nodes in that of their first rank."""
    nodes = list(dict.fromkeys(device.node for device in devices))
    on = {node: [device for device in devices if device.node == node] for node in nodes}
    restart = str(generation - 1)  # a command is never moved: each generation is a start
    every = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(len(devices)),
        "ROLE_WORLD_SIZE": str(len(devices)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "TORCHELASTIC_RUN_ID": job_id,
        "TORCHELASTIC_RESTART_COUNT": restart,
        "SUIKA_JOB": job_id,
        "SUIKA_RESTART": restart,
    }
    found = []
    for rank, device in enumerate(devices):
        here = on[device.node]
        own = {
            "RANK": str(rank),
            "ROLE_RANK": str(rank),
            "LOCAL_RANK": str(here.index(device)),
            "LOCAL_WORLD_SIZE": str(len(here)),
            "GROUP_RANK": str(nodes.index(device.node)),
            "SUIKA_NODE": device.node,
            "SUIKA_DEVICES": ",".join(str(each.index) for each in here),
        }
        found.append({**every, **own})
    return found
