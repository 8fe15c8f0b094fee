"""Commands on real agents, and what befalls them: the controller, the agent or the link goes, a node is drained."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from controllers import ServedCluster
from outages import alive, wait

pytestmark = [pytest.mark.fault, pytest.mark.timeout(240)]

# Writes a line per tenth of a second: which incarnation, which rank, when. SIGTERM: the last line, then the end.
BEATS = """
import os, signal, sys, time
def beat(word):
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.environ['SUIKA_RESTART']} {os.environ['RANK']} {word} {time.time()}\\n")
def end(*_):
    beat("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("begins", os.environ["SUIKA_RESTART"], flush=True)
while not os.path.exists(sys.argv[1] + ".stop"):
    beat("beat")
    print("beat " * 20, flush=True)
    time.sleep(0.1)
print("ends well", flush=True)
over, until = f"{sys.argv[1]}.over{os.environ['SUIKA_RESTART']}.", time.time() + 5
open(over + os.environ["RANK"], "w").close()
ranks = range(int(os.environ["WORLD_SIZE"]))  # the first to end in failure has the others stopped
while time.time() < until and not all(os.path.exists(over + str(rank)) for rank in ranks):
    time.sleep(0.01)
sys.exit(int(open(sys.argv[1] + ".stop").read()))
"""


class Cluster(ServedCluster):
    """With a short lease, and logs of a few KiB."""

    def begin(self) -> subprocess.Popen[bytes]:
        return self._run("controller", "serve", "--lease", 6, "--policy", self.policy)

    def _agent(self, url: str, name: str, devices: int) -> subprocess.Popen[bytes]:
        place = ("--join", url, "--token-file", self.home / "node.token", "--home", self.folder / name)
        more = ("--log-size", 4096, "--log-files", 3)
        return self._run(name, "agent", *place, "--name", name, "--devices", f"cpu:{devices}", *more)

    def again(self, number: int) -> None:
        """The agent of node `number` once more, after its end."""
        url = json.loads((self.home / "controller.json").read_text())["url"]
        self.agents[number] = self._agent(url, f"n{number}", 3)

    def cli(self, *arguments: object, code: int = 0) -> str:
        command = [sys.executable, "-m", "suika.cli", *map(str, arguments)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stdout

    def beats(self, name: str, num: int, **spec: Any) -> Path:
        """Submit a gang that beats; returns the file of its beats."""
        path = self.folder / f"beats-{name}"
        command = [sys.executable, "-c", BEATS, str(path)]
        self.ask("submit", job={"name": name, "command": command, "devices": {"min": num, "max": num}} | spec)
        wait(lambda: {line[1] for line in lines(path)} == {str(rank) for rank in range(num)}, 60, f"{name} to beat")
        return path

    def state(self, name: str) -> str:
        return self.rows()[name]["state"]

    def wait_state(self, name: str, state: str, timeout_s: float = 60) -> None:
        wait(lambda: self.state(name) == state, timeout_s, f"{name}: {state}, is {self.rows()[name]}")


def lines(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines() if line.count(" ") == 3] if path.exists() else []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), nodes=2, devices=3)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def cleared(cluster: Cluster) -> Iterator[None]:
    yield
    for row in cluster.ask("jobs"):
        cluster.ask("cancel", job=row["id"])
    for node in cluster.ask("nodes"):
        if node["draining"]:
            cluster.ask("drain", node=node["name"], undo=True)
    wait(lambda: all(d["state"] == "free" for n in cluster.ask("nodes") for d in n["devices"]), 90, "free devices")


def test_a_killed_controller_and_a_killed_agent_are_not_noticed(cluster: Cluster) -> None:
    path = cluster.beats("steady", 4)
    ranks = cluster.rank_pids()
    cluster.kill_controller()
    before = len(lines(path))
    wait(lambda: len(lines(path)) > before, 30, "it to run on")
    cluster.controller = cluster.begin()
    wait(lambda: "taken-back" in [e["kind"] for e in cluster.ask("events", job="steady")], 60, "its taking back")
    cluster.agents[0].kill()
    cluster.agents[0].wait(20)
    cluster.again(0)
    wait(lambda: sum(cluster.ask("status")["nodes"].values()) == 2, 60, "the agent to come back")
    assert cluster.rank_pids() == ranks
    assert {line[0] for line in lines(path)} == {"0"}, "one incarnation"
    Path(f"{path}.stop").write_text("3")
    wait(
        lambda: "recovering" in [e["kind"] for e in cluster.ask("events", job="steady")],
        60,
        "its exit code to be heard",
    )
    Path(f"{path}.stop").write_text("0")
    cluster.wait_state("steady", "finished")
    assert cluster.rows()["steady"]["exit_code"] == 0


def test_b08_a_partitioned_node_never_runs_it_a_second_time(cluster: Cluster) -> None:
    """The agent is stopped past its lease: the old ranks end by themselves before new ones begin elsewhere."""
    path = cluster.beats("fenced", 2, outage_s=10)
    (node,) = {device.partition("/")[0] for device in cluster.rows()["fenced"]["devices"]}
    agent = cluster.agents[int(node[1])]
    old = [p for p in cluster.rank_pids() if alive(p)]
    agent.send_signal(signal.SIGSTOP)
    try:
        wait(lambda: any(line[0] == "1" for line in lines(path)), 90, "the second incarnation")
    finally:
        agent.send_signal(signal.SIGCONT)
    first = max(float(line[3]) for line in lines(path) if line[0] == "0")
    second = min(float(line[3]) for line in lines(path) if line[0] == "1")
    assert first < second, "never at the same time"
    (other,) = {device.partition("/")[0] for device in cluster.rows()["fenced"]["devices"]}
    assert other != node
    wait(lambda: sum(cluster.ask("status")["nodes"].values()) == 2, 60, "the node to come back")
    wait(lambda: not any(alive(pid) for pid in old), 20, "the old ranks to be gone")
    restarts = [int(line[0]) for line in lines(path)]
    assert restarts == sorted(restarts), "one history"


def test_b54_a_rank_is_killed_with_its_agent(cluster: Cluster) -> None:
    path = cluster.beats("orphans", 2)
    (node,) = {device.partition("/")[0] for device in cluster.rows()["orphans"]["devices"]}
    agent = cluster.agents[int(node[1])]
    family = [psutil.Process(pid) for pid in cluster.rank_pids()]
    family += [child for process in family for child in process.children(recursive=True)]
    agent.kill()
    agent.wait(20)
    os.kill(family[0].pid, signal.SIGKILL)
    psutil.wait_procs(family[:1], timeout=10)
    cluster.again(int(node[1]))
    wait(lambda: any(line[0] == "1" for line in lines(path)), 90, "its second life")
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left, "nothing of the first"


def test_drained_by_a_deadline(cluster: Cluster) -> None:
    """A training job moves live, a command is signalled and begins elsewhere, one that forbids it is reported."""
    cluster.ask("submit", job=cluster.job("train", 1_000_000, 1, 1))
    cluster.wait_state("train", "running")
    (device,) = cluster.rows()["train"]["devices"]
    node = device.partition("/")[0]
    path = cluster.beats("gang", 1, preemption={"grace_s": 20})
    forbids = cluster.beats("forbids", 1, preemption={"policy": "never"})
    on = {name: row["devices"][0].partition("/")[0] for name, row in cluster.rows().items() if row["devices"]}
    assert on == dict.fromkeys(on, node), "packed on one node"
    pid = cluster.rank_pids()
    out = cluster.cli("drain", node, "--deadline", "40s", "--wait", code=1)
    assert "late" in out
    row = next(row for row in cluster.ask("nodes") if row["name"] == node)
    assert [left["name"] for left in row["drain"]["left"]] == ["forbids"]
    rows = cluster.rows()
    assert rows["train"]["num_moves"] == 1
    assert rows["train"]["generation"] == 2, "the same processes, moved live"
    assert (rows["train"]["state"], rows["gang"]["state"], rows["forbids"]["state"]) == ("running",) * 3
    assert not rows["train"]["devices"][0].startswith(node)
    assert not rows["gang"]["devices"][0].startswith(node)
    assert [line[2] for line in lines(path) if line[0] == "0"][-1] == "saved"
    assert pid & cluster.rank_pids(), "who forbids it was not touched"
    Path(f"{forbids}.stop").write_text("0")
    wait(lambda: cluster.ask("nodes")[int(node[1])]["drain"]["state"] == "drained", 30, "the node to be empty")
    assert "ready" in cluster.cli("undrain", node)


def test_logs_are_followed_over_rotation_and_restarts(cluster: Cluster) -> None:
    path = cluster.beats("talks", 2, max_restarts=1)
    command = [sys.executable, "-m", "suika.cli", "logs", "talks", "-f"]
    follower = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.PIPE, text=True)
    time.sleep(4)  # some 4 KiB a process
    Path(f"{path}.stop").write_text("5")
    wait(lambda: any(line[0] == "1" for line in lines(path)) or cluster.state("talks") == "failed", 60, "its restart")
    cluster.wait_state("talks", "failed")
    out, _ = follower.communicate(timeout=30)
    shown = out.splitlines()
    for rank in (0, 1):
        mine = [line.removeprefix(f"[{rank}] ") for line in shown if line.startswith(f"[{rank}] ")]
        assert mine[0] == "begins 0"
        assert mine.count("ends well") == 2, "in both lives"
        beats = sum(line[1] == str(rank) and line[2] == "beat" for line in lines(path))
        assert sum(line.startswith("beat") for line in mine) == beats, "no line twice, none missing"
    assert cluster.cli("logs", "talks", "--rank", 1, "--tail", 1).splitlines() == ["ends well"] * 2
    assert cluster.rows()["talks"]["exit_code"] == 5
    sizes = [file.stat().st_size for node in ("n0", "n1") for file in (cluster.folder / node / "logs").iterdir()]
    assert max(sizes) <= 4096


def test_wait_gives_the_commands_own_exit_code(cluster: Cluster, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: code\ncommand: [/bin/sh, -c, 'pwd; exit 42']\nmax_restarts: 0\n")
    cluster.cli("submit", job, "--wait", code=42)
    assert cluster.cli("logs", "code", "--raw") == f"{tmp_path}\n", "a command runs where its file lies"


def test_jobs_of_another_user(cluster: Cluster, tmp_path: Path) -> None:
    """As root the agent's jobs run as the user that it was given; otherwise it refuses to start."""
    common = ("agent", "--join", "http://127.0.0.1:1", "--token-file", cluster.home / "node.token", "--user")
    error = subprocess.run(
        [sys.executable, "-m", "suika.cli", *map(str, (*common, "no-such-user", "--devices", "cpu:1"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (error.returncode, "no user of this machine" in error.stderr) == (2, True), error.stderr
    if os.geteuid() != 0:
        refused = subprocess.run(
            [sys.executable, "-m", "suika.cli", *map(str, (*common, "root", "--devices", "cpu:1"))],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (refused.returncode, "only root" in refused.stderr) == (2, True), refused.stderr
        return
    url = json.loads((cluster.home / "controller.json").read_text())["url"]
    place = ("--join", url, "--token-file", cluster.home / "node.token", "--home", cluster.folder / "n9")
    agent = cluster._run(
        "as-nobody", "agent", *place, "--name", "n9", "--devices", "cpu:1", "--type", "other", "--user", "nobody"
    )
    cluster.agents.append(agent)
    wait(lambda: cluster.ask("status")["nodes"].get("n9"), 60, "the node")
    devices = {"min": 1, "max": 1, "type": "other"}
    command = ["/bin/sh", "-c", "id -u; id -G; cat /proc/self/loginuid > /dev/null; test ! -w /etc/passwd"]
    cluster.ask(
        "submit", job={"name": "nobody", "command": command, "devices": devices, "environment": {"workdir": "/"}}
    )
    wait(lambda: cluster.rows()["nobody"]["ended_s"] is not None, 60, "its end")
    nobody = pwd.getpwnam("nobody")
    assert cluster.cli("logs", "nobody", "--raw").split() == [str(nobody.pw_uid), str(nobody.pw_gid)]
    assert cluster.rows()["nobody"]["exit_code"] == 0


def test_a_node_without_torch_runs_commands_and_says_so_to_a_training_job(cluster: Cluster, tmp_path: Path) -> None:
    """What `suika[server]` alone can do: torch cannot be imported in the agent nor in its fork server."""
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = None\n')
    url = json.loads((cluster.home / "controller.json").read_text())["url"]
    place = ("--join", url, "--token-file", cluster.home / "node.token", "--home", cluster.folder / "bare")
    before = cluster.environment
    cluster.environment = before | {"PYTHONPATH": str(tmp_path)}
    try:
        agent = cluster._run("bare", "agent", *place, "--name", "bare", "--devices", "cpu:2", "--type", "H100")
    finally:
        cluster.environment = before
    cluster.agents.append(agent)
    wait(lambda: cluster.ask("status")["nodes"].get("bare"), 60, "the node")
    devices = {"min": 2, "max": 2, "type": "H100"}
    script = "import importlib.util as u; print(u.find_spec('torch'))"
    file = {"name": "light", "command": [sys.executable, "-c", script], "devices": devices}
    cluster.ask("submit", job=file | {"environment": {"variables": {"PYTHONPATH": str(tmp_path)}}})
    wait(lambda: cluster.rows()["light"]["ended_s"] is not None, 60, "its end")
    assert cluster.rows()["light"]["state"] == "finished"
    assert cluster.cli("logs", "light", "--raw").split() == ["None", "None"]
    cluster.ask("submit", job=cluster.job("heavy", 10, 2, 2) | {"devices": devices})
    wait(lambda: cluster.rows()["heavy"]["ended_s"] is not None, 60, "its refusal")
    row = cluster.rows()["heavy"]
    assert (row["state"], "has no torch" in row["reason"]["sentence"]) == ("failed", True), row
