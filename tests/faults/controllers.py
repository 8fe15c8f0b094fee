"""A controller and agents as processes of their own, and a client that never gives up: what a cluster's users have."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outages import alive, fork_servers_below, wait

from suika.control.client import NoControllerError, call

MODEL = {"family": "llama", "layers": 2, "hidden": 16, "ffn": 32, "heads": 2, "vocab": 257}


class ServedCluster:
    """`nodes` agents with `devices` CPU devices each, and one controller, which a test kills at will."""

    def __init__(self, folder: Path, policy: str = "suika", nodes: int = 2, devices: int = 3) -> None:
        self.folder, self.home, self.policy = folder, folder / "home", policy
        self.home.mkdir()
        self.text = folder / "text"
        self.text.write_text("some text to train on\n" * 200)
        self.environment = {**os.environ, "SUIKA_HOME": str(self.home)}
        self.socket = self.home / "controller.sock"
        self.controller = self.begin()
        self.ask("status")
        url = json.loads((self.home / "controller.json").read_text())["url"]
        self.agents = [self._agent(url, f"n{number}", devices) for number in range(nodes)]
        wait(lambda: sum(self.ask("status")["nodes"].values()) == nodes, 120, "the nodes to join")

    def _run(self, name: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "suika.cli", *(str(argument) for argument in arguments)]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    def _agent(self, url: str, name: str, devices: int) -> subprocess.Popen[bytes]:
        place = ("--join", url, "--token-file", self.home / "node.token", "--home", self.folder / name)
        return self._run(name, "agent", *place, "--name", name, "--devices", f"cpu:{devices}")

    def begin(self) -> subprocess.Popen[bytes]:
        return self._run("controller", "serve", "--lease", 30, "--policy", self.policy)

    def kill_controller(self) -> None:
        self.controller.kill()
        self.controller.wait(20)

    def ask(self, name: str, timeout_s: float = 120.0, **arguments: Any) -> Any:
        """A call, repeated until it is answered."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return call(name, self.socket, **arguments)
            except (NoControllerError, OSError, ValueError):
                assert time.monotonic() < deadline, (self.folder / "controller.log").read_text()[-3000:]
                time.sleep(0.05)

    def job(self, name: str, steps: int, low: int, high: int, **more: Any) -> dict[str, Any]:
        base = {"name": name, "model": MODEL, "data": str(self.text), "global_batch": 8, "sequence_length": 16}
        return base | {"steps": steps, "devices": {"min": low, "max": high}, "snapshot_every_steps": 20} | more

    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["name"]: row for row in self.ask("jobs", all=True)}

    def rank_pids(self) -> set[int]:
        """All that the fork servers have forked and that lives."""
        found: set[int] = set()
        for server in fork_servers_below(self.folder):
            with contextlib.suppress(OSError):
                found |= {int(p) for p in Path(f"/proc/{server}/task/{server}/children").read_text().split()}
        return {pid for pid in found if alive(pid)}

    def close(self) -> None:
        with contextlib.suppress(Exception):
            call("down", self.socket, timeout_s=10)
            self.controller.wait(30)
        for process in (self.controller, *self.agents):
            if process.poll() is None:
                process.kill()
                process.wait(20)
        for pid in fork_servers_below(self.folder):
            os.kill(pid, 15)
            wait(lambda pid=pid: not alive(pid), 30, "a fork server to end")


@contextlib.contextmanager
def served(folder: Path, **more: Any) -> Iterator[ServedCluster]:
    cluster = ServedCluster(folder, **more)
    try:
        yield cluster
    finally:
        cluster.close()
