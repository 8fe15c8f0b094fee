"""Two nodes in network namespaces of their own: ranks meet at the addresses that their agents say, not on loopback."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from controllers import ServedCluster
from outages import wait

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

GANG = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", int(total), os.environ["MASTER_ADDR"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts(tag: str) -> Iterator[dict[str, tuple[str, str]]]:
    """{node: (namespace, address)}: two namespaces on one bridge; the first machine's end has 10.213.7.1."""
    bridge, hosts = f"sb{tag}", {f"n{i}": (f"sn{tag}{i}", f"10.213.7.{i + 2}") for i in range(2)}
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("addr", "add", "10.213.7.1/24", "dev", bridge)
        ip("link", "set", bridge, "up")
        for number, (space, address) in enumerate(hosts.values()):
            ip("netns", "add", space)
            ip("link", "add", f"sv{tag}{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", f"sv{tag}{number}", "master", bridge, "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield hosts
    finally:
        for space, _ in hosts.values():
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def may_make_namespaces() -> bool:
    tried = subprocess.run(["ip", "netns", "add", "suika-try"], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "del", "suika-try"], check=False, capture_output=True)
    return tried.returncode == 0


class Apart(ServedCluster):
    """Agents in namespaces; they reach the controller, which serves loopback alone, through a relay."""

    hosts: dict[str, tuple[str, str]]

    def _agent(self, url: str, name: str, devices: int) -> subprocess.Popen[bytes]:
        port = url.rpartition(":")[2]
        space, address = self.hosts[name]
        relay = [sys.executable, str(Path(__file__).parent / "relay.py"), "10.213.7.1", port]
        self.relays = [*getattr(self, "relays", []), subprocess.Popen(relay)] if name == "n0" else self.relays
        place = ("--join", f"http://10.213.7.1:{port}", "--token-file", self.home / "node.token")
        more = ("--home", self.folder / name, "--name", name, "--devices", f"cpu:{devices}", "--address", address)
        command = [sys.executable, "-m", "suika.cli", "agent", *map(str, (*place, *more))]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", space, *command], stdout=log, stderr=log, env=self.environment
            )

    def close(self) -> None:
        super().close()
        for relay in self.relays:
            relay.kill()
            relay.wait()


def test_ranks_of_two_hosts_meet(tmp_path: Path) -> None:
    if os.geteuid() != 0 or not may_make_namespaces():
        pytest.skip("NETWORK NAMESPACES NEED ROOT: two hosts cannot be had here")
    with two_hosts(str(os.getpid() % 10_000)) as hosts:
        Apart.hosts = hosts
        cluster = Apart(tmp_path, nodes=2, devices=2)
        try:
            file = {"name": "gang", "command": [sys.executable, "-c", GANG], "devices": {"min": 4, "max": 4}}
            cluster.ask("submit", job=file)
            wait(lambda: cluster.rows()["gang"]["ended_s"] is not None, 90, "the gang to end")
            printed = [entry["text"] for entry in cluster.ask("logs", job="gang")["entries"]]
            assert cluster.rows()["gang"]["state"] == "finished", printed
            decided = next(event for event in cluster.ask("events", job="gang") if event["kind"] == "decided")
            first = decided["data"]["devices"][0].partition("/")[0]
            assert [text.splitlines()[-1] for text in printed] == [f"sum 10 {hosts[first][1]}"] * 4

            cluster.ask("submit", job=cluster.job("train", 60, 4, 4, layout={"dp": 4}))
            wait(lambda: cluster.rows()["train"]["ended_s"] is not None, 90, "training over both hosts")
            assert cluster.rows()["train"]["state"] == "finished"
        finally:
            cluster.close()
