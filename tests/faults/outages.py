"""A controller's hub with its network door in this process, and real agents as processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from suika.control.accounts import Accounts
from suika.control.agent_door import install_agents
from suika.control.agents import AgentHub
from suika.control.auth import Role
from suika.control.engines import open_engine
from suika.control.migrate import migrate
from suika.control.netdoor import NetDoor
from suika.control.sessions import Watcher
from suika.runtime.coordinator import JobRun

PROGRAMS = Path(__file__).parents[1] / "runtime"  # where tiny_program lies


class Seen(Watcher):
    def __init__(self) -> None:
        self.nodes: dict[str, dict[str, int]] = {}
        self.gone: list[str] = []

    def arrived(self, node: Any, processes: Mapping[str, int]) -> None:
        self.nodes[node.name] = dict(processes)

    def lost(self, node: str) -> None:
        self.nodes.pop(node, None)
        self.gone.append(node)


class Net:
    """`controller` can be replaced by another one at the same port, as after a crash."""

    def __init__(self, folder: Path, lease_s: float = 60.0) -> None:
        self.folder, self.lease_s, self.port = folder, lease_s, 0
        engine = open_engine(f"sqlite:///{folder}/accounts.db")
        migrate(engine)
        self.accounts = Accounts(engine)
        self.accounts.add("node", Role.NODE)
        self.token = folder / "token"
        self.token.write_text(self.accounts.issue("node"))
        self.token.chmod(0o600)
        self.agents: list[subprocess.Popen[bytes]] = []
        self.fork_servers: set[int] = set()
        self.begin()

    def begin(self) -> None:
        """A new controller: it knows nothing of what the old one asked for."""
        self.seen = Seen()
        self.hub = AgentHub(self.seen, self.lease_s)
        self.hub.start()
        app = FastAPI()
        install_agents(app, self.hub, self.accounts)
        self.door = NetDoor(app, "127.0.0.1", self.port)
        self.port = int(self.door.url.rpartition(":")[2])

    def end(self) -> None:
        self.door.close()
        self.hub.close()

    def agent(self, name: str = "a", devices: int = 4, orphan_limit_s: float = 120.0) -> subprocess.Popen[bytes]:
        home = self.folder / name
        command = [sys.executable, "-m", "suika.cli", "agent", "--join", f"http://127.0.0.1:{self.port}"]
        command += ["--token-file", str(self.token), "--name", name, "--devices", f"cpu:{devices}"]
        command += ["--home", str(home), "--orphan-limit", str(orphan_limit_s), "--program", "tiny_program:build"]
        environment = {**os.environ, "PYTHONPATH": str(PROGRAMS)}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.agents.append(process)
        return process

    def wait_for(self, name: str, timeout_s: float = 90.0) -> dict[str, int]:
        """Until the node is there; its processes that nobody has claimed."""
        wait(lambda: name in self.seen.nodes, timeout_s, f"{name} to connect")
        return self.seen.nodes[name]

    def close(self) -> None:
        for process in self.agents:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait(20)
        self.end()
        for pid in fork_servers_below(self.folder):
            os.kill(pid, signal.SIGTERM)
            wait(lambda pid=pid: not alive(pid), 20, "a fork server to end")


def abandon(run: JobRun) -> None:
    """What a killed controller leaves of a run: nothing is told to its processes. Done between two of its events."""

    def leave() -> None:
        run.closed = True
        run.gang.members.clear()
        run.copies.holders.alive.clear()

    run.command(leave).result(10)
    assert run.await_end(10)


def fork_servers_below(folder: Path) -> list[int]:
    """Pids of the lasting fork servers whose socket lies below `folder`: started by this test, nobody else's."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            own = any(part.startswith(os.fsencode(folder) + b"/") for part in command)
            if b"suika.runtime.lasting" in command and own and _parent_is_no_fork_server(entry):
                found.append(int(entry.name))
    return found


def _parent_is_no_fork_server(entry: Path) -> bool:
    """A forked rank shows its server's command line; the server leads its session."""
    return os.getsid(int(entry.name)) == int(entry.name)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.02)
