"""A cluster on this machine that survives its controller: a `Daemon`, and one agent per node beside it.

Agents are processes of their own session. An orderly end takes them, and all jobs, along; after a SIGKILL of the
controller they live on, and the next start finds them by the lock that each holds in its folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from suika.agent.forks import end_fork_server
from suika.agent.lock import holder
from suika.control.daemon import Daemon
from suika.control.emulation import Real, World
from suika.core.cluster import Cluster, Node

_AGENT_END_WAIT_S = 15.0


class LocalCluster:
    """Use as a context, like the daemon that it holds."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        policy: str = "suika",
        world: World | None = None,
    ) -> None:
        self._world = world or Real(cores=len(os.sched_getaffinity(0)))
        self.daemon = Daemon(folder, cluster.nodes, policy=policy, world=self._world)
        self.daemon.ends_jobs = True
        self._nodes = cluster.nodes
        self._folder = folder.absolute()
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> LocalCluster:
        self.daemon.__enter__()
        agents = self._folder / "agents"
        for name, nodes, options in self._world.agents(self._nodes):
            if any(holder(self._home(node)) is None for node in nodes):
                child = self._run(agents / name, options)
                self._children |= dict.fromkeys((node.name for node in nodes), child)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.daemon.close()
        for node in self._nodes:
            self._end(node)

    def _home(self, node: Node) -> Path:
        return self._folder / "agents" / node.name

    def _run(self, home: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = [sys.executable, "-m", "suika.cli", "agent", "--join", self.daemon.url]
        # Jobs run as whoever started this cluster, root included: only that user reaches its socket.
        command += ["--allow-root", "--token-file", str(self._folder / "node.token"), "--home", str(home), *options]
        with (home / "agent.log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
            )

    def _end(self, node: Node) -> None:
        """The agent first, since it would start its fork server again."""
        child, pid = self._children.get(node.name), holder(self._home(node))
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if child is not None:
            try:
                child.wait(_AGENT_END_WAIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        deadline = time.monotonic() + _AGENT_END_WAIT_S
        while holder(self._home(node)) is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        end_fork_server(self._home(node))
