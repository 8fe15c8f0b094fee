"""A controller that starts over a full store: 1,000 active and 9,000 ended jobs, 1,000 nodes.

    python bench/control_scale.py [--active 1000] [--ended 9000] [--nodes 1000] [--policy suika] [--agents]

Fills a SQLite store in a temporary folder, then starts the service over it in this process and reports, as one JSON
document: seconds from opening the store to the end of the first decision cycle, seconds per cycle after that, the
first page of 100 jobs over the network door (server and client on this machine), and the peak memory of this process
and of the one that decides. The nodes are in memory: they are connected to the hub and silent, and no process runs on
them; all active jobs queue at first, and the cycle hands out devices to as many as the devices allow. With `--agents`
the nodes are emulated ones whose agents share one process, as `suika agent --emulate` brings them up: they connect over
the network, send signs of life, and act out the jobs that are started on them. In a cluster they would have machines of
their own; here they have a lower priority than the controller (`--agents-nice`, 10 by default).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx

from suika.agent.link import PROTOCOL, Wire
from suika.control.daemon import Daemon
from suika.control.database import DatabaseStore
from suika.control.store import News
from suika.core.cluster import Node, parse_cluster_shorthand
from suika.core.decision import Reason, ReasonCode
from suika.core.job import Job, JobState, parse_job

MODEL = {"family": "llama", "layers": 32, "hidden": 4096, "ffn": 11008, "heads": 32, "vocab": 32000}
WHY = Reason(ReasonCode.CANCELLED, "the benchmark fills its store")


def fill(url: str, text: Path, num_active: int, num_ended: int, nodes: tuple[Node, ...]) -> None:
    store = DatabaseStore(url)
    with store.together():
        _fill(store, text, num_active, num_ended)
        store.remember(*nodes)
    store.close()


def _fill(store: DatabaseStore, text: Path, num_active: int, num_ended: int) -> None:
    for index in range(num_ended + num_active):
        body = {"name": f"job-{index}", "model": MODEL, "data": str(text), "global_batch": 64, "steps": 1000 + index}
        body |= {"sequence_length": 2048, "devices": {"min": 1 + index % 4, "max": 8}, "precision": "bf16"}
        job = Job(f"j{index}", parse_job(body), 1000.0 + index)
        store.add(job, News(job.submitted_s, "submitted", {"body": ""}))
        if index < num_ended:
            store.put(job.to(JobState.CANCELLED, WHY, ended_s=2000.0 + index), News(2000.0 + index, "job-cancelled"))


def connect(daemon: Daemon, node: Node) -> None:
    """A node that is there and takes every order, in memory."""
    wire, connection = Wire(), object()
    hello = {"protocol": PROTOCOL, "node": asdict(node), "incarnation": "one", "controller": None, "received": 0}
    _, answer = daemon.hub.join(hello, connection)

    def send(frame: dict[str, Any]) -> None:
        daemon.hub.receive(node.name, connection, json.dumps(frame))
        daemon.hub.acknowledge(node.name, connection)

    wire.connect(send, answer["received"])
    daemon.hub.ready(node.name, connection, lambda frame: wire.take(frame) and None, 0)
    wire.put({"event": "hello", "processes": []})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--active", type=int, default=1000)
    parser.add_argument("--ended", type=int, default=9000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--policy", default="suika")
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--agents-nice", type=int, default=10)
    arguments = parser.parse_args()
    nodes = parse_cluster_shorthand(f"{arguments.nodes}x8:A800").nodes
    with tempfile.TemporaryDirectory(prefix="suika-scale-") as folder:
        home = Path(folder)
        text = home / "text"
        text.write_text("some text to train on\n" * 1000)
        fill(f"sqlite:///{home}/suika.db", text, arguments.active, arguments.ended, nodes)
        agents_nice = arguments.agents_nice if arguments.agents else None
        print(json.dumps(measure(home, arguments.policy, nodes, agents_nice), indent=2))


@contextmanager
def joined(daemon: Daemon, home: Path, nodes: tuple[Node, ...], agents_nice: int | None) -> Iterator[None]:
    """All nodes are here."""
    if agents_nice is None:
        for node in nodes:
            connect(daemon, node)
        yield
        return
    command = ["nice", "-n", str(agents_nice), sys.executable, "-m", "suika.cli", "agent"]
    command += ["--emulate", f"{len(nodes)}x8:A800", "--join", daemon.url]
    command += ["--token-file", str(home / "node.token"), "--home", str(home / "agents")]
    with (home / "agents.log").open("wb") as log:
        agent = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 180
        while sum(daemon.hub.nodes.values()) < len(nodes):
            if time.monotonic() > deadline or agent.poll() is not None:
                sys.exit(
                    f"only {sum(daemon.hub.nodes.values())} nodes came: {(home / 'agents.log').read_text()[-500:]}"
                )
            time.sleep(0.1)
        yield
    finally:
        agent.terminate()
        agent.wait(30)


def settled(daemon: Daemon, nodes: tuple[Node, ...], ended_s: list[float], began_s: float) -> bool:
    """All nodes offer their devices, and nothing has been left to decide for two seconds."""
    quiet_s = time.perf_counter() - began_s - ended_s[-1]
    return len(daemon.roster.found) == len(nodes) and not daemon.controller.state.changed and quiet_s > 2.0


def pages(client: httpx.Client, go_on: Callable[[], bool], most: int = 200, gap_s: float = 0.25) -> dict[str, float]:
    """Answer times of the first page of 100 jobs in seconds: of the active ones and of all, turn about."""
    took_s: list[float] = []
    while go_on() and len(took_s) < most:
        query = ("limit=100", "all=true&limit=100")[len(took_s) % 2]
        took_s.append(client.get(f"/v1/jobs?{query}").elapsed.total_seconds())
        time.sleep(gap_s)
    if len(took_s) < 2:
        return {}
    p99 = statistics.quantiles(took_s, n=100, method="inclusive")[98]
    return {"pages": len(took_s), "p50": statistics.median(took_s), "p99": p99, "max": max(took_s)}


def peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(home: Path, policy: str, nodes: tuple[Node, ...], agents_nice: int | None) -> dict[str, Any]:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    daemon = Daemon(home, policy=policy)
    opened_s = time.perf_counter() - began_s
    took_s: list[float] = []
    cpu_s: list[float] = []
    ended_s: list[float] = []
    decide = daemon.controller.actor.decide

    def timed() -> Any:
        at_s, at_cpu_s = time.perf_counter(), time.thread_time()
        result = decide()
        cpu_s.append(time.thread_time() - at_cpu_s)
        took_s.append(time.perf_counter() - at_s)
        ended_s.append(time.perf_counter() - began_s)
        return result

    daemon.controller.actor.decide = timed  # type: ignore[method-assign]
    with daemon:
        while not ended_s:
            time.sleep(0.005)
        first_s, first_cpu_s = ended_s[0], time.process_time() - began_cpu_s
        token = (home / "admin.token").read_text().strip()
        with httpx.Client(base_url=daemon.url, headers={"authorization": f"Bearer {token}"}, timeout=60) as client:
            before = len(took_s)
            with joined(daemon, home, nodes, agents_nice):
                deadline = time.monotonic() + 150
                while time.monotonic() < deadline and not settled(daemon, nodes, ended_s, began_s):
                    time.sleep(0.05)
                client.get("/v1/jobs")
                state = daemon.controller.state

                def held() -> int:
                    return sum(bool(watch.held) for watch in state.watches.values())

                def running() -> int:
                    return sum(job.state is JobState.RUNNING for job in state.active())

                while_starting = pages(client, lambda: agents_nice is not None and running() < held())
                pages_s = pages(client, lambda: True)
                counts = {"jobs_with_devices": held(), "jobs_running": running()}
                memory = {"controller": peak_bytes(os.getpid()), "decisions": peak_bytes(daemon.decisions_pid)}
    return {
        "policy": policy,
        "open_s": opened_s,
        "open_to_first_decision_s": first_s,
        "open_to_first_decision_cpu_s": first_cpu_s,  # what an idle machine would need
        "cycle_s": {"first": took_s[0], "median_with_nodes": statistics.median(took_s[before:] or [0.0])},
        "cycle_cpu_s": {"first": cpu_s[0], "median_with_nodes": statistics.median(cpu_s[before:] or [0.0])},
        "first_page_of_100_s": {"while_jobs_start": while_starting, "after": pages_s},
        **counts,
        "peak_bytes": memory,
    }


if __name__ == "__main__":
    main()
