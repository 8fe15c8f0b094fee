"""Load on the controller's network door: many clients submit at once, then one reads pages.

    python bench/control_load.py [--jobs 1000] [--clients 20] [--seconds 10] [--database URL]

Prints one JSON document. The controller runs as its own process, on SQLite in a temporary folder unless a database is
named; its nodes are expected but absent, so that all jobs queue and every cycle looks at all of them.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(int(len(values) * q), len(values) - 1)]


class Client:
    """One connection that is kept, as a program's would be."""

    def __init__(self, address: str, token: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def ask(self, method: str, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any, float]:
        """(status, document or text, seconds)."""
        headers = self._headers | ({"Idempotency-Key": key} if key else {})
        began_s = time.perf_counter()
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        text = response.read()
        taken_s = time.perf_counter() - began_s
        document = json.loads(text) if response.getheader("content-type", "").startswith("application/json") else text
        return response.status, document, taken_s


def submit_all(address: str, token: str, text: Path, num_jobs: int, num_clients: int, seconds: float) -> dict[str, Any]:
    taken_s: list[float] = []
    ids: list[str] = []
    refused: list[Any] = []
    began_s = time.perf_counter()

    def client(number: int) -> None:
        mine = Client(address, token)
        for index in range(number, num_jobs, num_clients):
            time.sleep(max(0.0, began_s + index / num_jobs * seconds - time.perf_counter()))
            body = {"name": f"job-{index}", "model": MODEL, "data": str(text), "global_batch": 8, "steps": 100}
            body |= {"sequence_length": 16, "devices": {"min": 1, "max": 8}}
            status, answer, took_s = mine.ask("POST", "/v1/jobs", body, key=f"k{index}")
            taken_s.append(took_s)
            (ids if status == 201 else refused).append(answer["id"] if status == 201 else answer)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall_s = time.perf_counter() - began_s
    seen: set[str] = set()
    reader, after = Client(address, token), None
    while True:
        page = reader.ask("GET", "/v1/jobs?limit=1000" + (f"&after={after}" if after else ""))[1]
        seen |= {job["id"] for job in page["jobs"]}
        after = page["next"]
        if after is None:
            break
    pages_s = [reader.ask("GET", "/v1/jobs?limit=100")[2] for _ in range(20)]
    return {
        "jobs": num_jobs,
        "clients": num_clients,
        "answered": len(taken_s),
        "refused": len(refused),
        "lost": len(set(ids) - seen),
        "wall_s": wall_s,
        "submit_s": {"p50": statistics.median(taken_s), "p99": quantile(taken_s, 0.99), "max": max(taken_s)},
        "first_page_of_100_s": {"p50": statistics.median(pages_s), "max": max(pages_s)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--cluster", default="8x8:A800")
    parser.add_argument("--database")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="suika-load-") as folder:
        home = Path(folder)
        text = home / "text"
        text.write_text("some text to train on\n" * 100)
        command = [sys.executable, "-m", "suika.cli", "serve", "--cluster", arguments.cluster, "--data-root", folder]
        command += ["--database", arguments.database] if arguments.database else []
        server = subprocess.Popen(command, env={**os.environ, "SUIKA_HOME": folder}, stderr=subprocess.DEVNULL)
        try:
            while not (home / "controller.json").exists():
                time.sleep(0.05)
                if server.poll() is not None:
                    sys.exit("the controller did not come up")
            address = json.loads((home / "controller.json").read_text())["url"].removeprefix("http://")
            token = (home / "admin.token").read_text().strip()
            result = submit_all(address, token, text, arguments.jobs, arguments.clients, arguments.seconds)
            status = Path(f"/proc/{server.pid}/status").read_text()
            result["controller_peak_bytes"] = int(status.partition("VmHWM:")[2].split()[0]) * 1024
            fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
            result["controller_cpu_s"] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        finally:
            server.terminate()
            server.wait(30)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
