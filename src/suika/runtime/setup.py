"""What happens on a node before the first rank of a training job starts there: the job's set-up command, and a look at
whether its environment can run ranks. No torch.

Each runs under a shepherd (runtime/command.py), like a command's, so that it is watched, logged and ended alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from suika.core.cluster import Device
from suika.core.environment import Environment
from suika.core.job import JobSpec
from suika.runtime import outside
from suika.runtime.gang import COMMAND_ENTRY, Gang, Member, UnableError

MOST_S = 3600.0
KIND = "setup"  # in the process's name, where a rank's has its generation


class SetUpError(RuntimeError):
    """A node cannot be prepared; its name, and why."""


def is_needed(environment: Environment) -> bool:
    return bool(environment.setup) or outside.is_needed(environment)


def is_of(process: str) -> bool:
    """Whether a process of this name prepares a node."""
    return process.split(".", 2)[1:2] == [KIND]


def set_up(
    gang: Gang, spec: JobSpec, generation: int, devices: Iterable[Device], check: Callable[[], None] = lambda: None
) -> None:
    """Prepare the nodes of `devices`. Raises `SetUpError` with what a command printed last if it fails on any."""
    steps = [spec.environment.setup] if spec.environment.setup else []
    if outside.is_needed(spec.environment):
        steps.append(outside.check_command(spec.environment))
    on: dict[str, list[Device]] = {}
    for device in devices:
        on.setdefault(device.node, []).append(device)
    for number, argv in enumerate(steps):
        members = [_begin(gang, spec, generation, number, argv, node, here) for node, here in on.items()]
        try:
            gang.gather("set-up", generation, members, MOST_S, check, complaint="no-start")
        except UnableError as error:
            at = members.index(error.member)
            raise SetUpError(f"{list(on)[at]}: {error.member.said['no-start', generation]['error']}") from None
        finally:
            gang.dismiss([member for member in members if member.alive])


def _begin(
    gang: Gang, spec: JobSpec, generation: int, number: int, argv: tuple[str, ...], node: str, here: list[Device]
) -> Member:
    inside = spec.environment.model_copy(update={"setup": argv})
    launch = {
        "job_id": gang.job_id,
        "generation": generation,
        "command": [],
        "environment": inside.model_dump(mode="json"),
    }
    name = f"{gang.job_id}.{KIND}.{generation}.{number}.{node}"
    member = gang.spawn(name, node, None, COMMAND_ENTRY, launch)
    indices = ",".join(str(device.index) for device in here)
    gang.tell([member], "setup", variables={"SUIKA_JOB": gang.job_id, "SUIKA_NODE": node, "SUIKA_DEVICES": indices})
    return member
