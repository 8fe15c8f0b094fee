"""`suika agent`: this machine becomes a node of a cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from suika.cli.ask import NO_CLUSTER
from suika.cli.extras import need
from suika.cli.output import note
from suika.cli.root import AllowRoot, require_no_root
from suika.core.errors import require
from suika.runtime.rooms import FRACTION


def agent(
    join: Annotated[str, typer.Option(help="The controller's URL, https://HOST:PORT.")],
    token_file: Annotated[Path, typer.Option(help="A file with the node token; only its owner may read it.")],
    name: Annotated[str | None, typer.Option(help="The node's name; by default the host's.")] = None,
    devices: Annotated[str, typer.Option(help="nvidia, or cpu:N for N devices on the CPU.")] = "nvidia",
    type: Annotated[str, typer.Option(help="The type of CPU devices.")] = "cpu",
    domain_size: Annotated[int, typer.Option(min=0, help="Devices that share an NVLink domain; 0: all.")] = 0,
    rack: Annotated[str, typer.Option(help="Where the node stands.")] = "",
    pod: Annotated[str, typer.Option(help="Where the rack stands.")] = "",
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust, for a private authority.")] = None,
    home: Annotated[Path | None, typer.Option(help="Socket and logs; by default $SUIKA_HOME/agent.")] = None,
    orphan_limit: Annotated[float, typer.Option(min=1, help="Seconds that jobs train on without a controller.")] = 3600,
    program: Annotated[list[str] | None, typer.Option(help="Other programs that ranks may load, module:build.")] = None,
    address: Annotated[str, typer.Option(help="Where other nodes reach this one; by default this node alone.")] = "",
    user: Annotated[str | None, typer.Option(help="Run jobs' processes as this user; needs root.")] = None,
    allow_root: AllowRoot = False,
    commands: Annotated[bool, typer.Option(help="Run rigid jobs: any command that a user submits.")] = True,
    log_size: Annotated[int, typer.Option(min=4096, help="Bytes of a file of a process's log.")] = 8 << 20,
    log_files: Annotated[int, typer.Option(min=2, help="Files of a process's log that are kept.")] = 4,
    copies_memory: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the memory that copies of jobs' state may take.")
    ] = FRACTION,
    emulate: Annotated[str | None, typer.Option(help="Act out all nodes of this cluster: NODESxDEVICES:TYPE.")] = None,
    speedup: Annotated[float, typer.Option(help="With --emulate: emulated seconds per second, 1 to 60.")] = 1.0,
    times: Annotated[Path | None, typer.Option(help="With --emulate: measured iteration times.")] = None,
) -> None:
    """Serve as a node until SIGTERM. Jobs survive a restart of the agent, and outages of the controller."""
    if emulate is not None:
        from suika.cli.emulate import act_out

        act_out(join, _token(token_file), emulate, speedup, times, home, ca)
        return
    need("agent", "server")
    from suika.agent.forks import ForksError, ForkServerClient
    from suika.agent.program import Agent, RefusedError
    from suika.agent.rules import TRAINER, Rules, User
    from suika.control.client import home as suika_home
    from suika.core.cluster import Node
    from suika.runtime.rooms import NodeMemory

    require(join.startswith(("https://", "http://")), "join", join, "is not a URL", "write https://HOST:PORT")
    if user is None:
        require_no_root(allow_root, "run it as another user, or give --user NAME")
    inventory = _inventory(devices, type)
    folder = (home or suika_home() / "agent").absolute()
    size = (inventory.num_devices, inventory.device_type, domain_size)
    node = Node(name or socket.gethostname(), *size, rack=rack, pod=pod)
    programs = (TRAINER, *(program or ()))
    preload = [text.partition(":")[0] for text in programs]
    forks = ForkServerClient(folder, orphan_limit, preload)
    owner = User.named(user) if user is not None else None
    visible = inventory.visible
    rules = Rules(programs, commands, _address(address), visible, owner, log_size, log_files)
    memory = partial(NodeMemory.here, copies_memory)
    served = Agent(join, _token(token_file), node, folder, forks, inventory, ca, rules, memory)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: served.stop())
    try:
        served.run()
    except (RefusedError, ForksError) as error:
        note(f"suika agent: {error}")
        sys.exit(NO_CLUSTER)


def _inventory(devices: str, device_type: str):  # type: ignore[no-untyped-def]  # a protocol of a module that is imported late
    from suika.agent.inventory import CpuDevices, NvidiaDevices

    kind, _, number = devices.partition(":")
    if kind == "cpu":
        require(number.isdecimal(), "devices", devices, "is not cpu:N", "write e.g. cpu:4")
        return CpuDevices(int(number), device_type)
    require(devices == "nvidia", "devices", devices, "is neither nvidia nor cpu:N")
    return NvidiaDevices()


def _address(address: str) -> str:
    """An address of this machine: ranks bind to it, and tell it to the others."""
    if address:
        try:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
                tried.bind((address, 0))
        except OSError as error:
            require(False, "address", address, f"cannot be bound: {error}", "give an address of this machine")
    return address


def _token(path: Path) -> str:
    require(path.is_file(), "token-file", str(path), "is not a file")
    open_to_others = os.stat(path).st_mode & 0o077
    require(not open_to_others, "token-file", str(path), "can be read by others", f"chmod 600 {path}")
    return path.read_text().strip()
