"""A gang of any command: real processes, all or nothing, ended as its owner, its ranks or its signals say."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from suika.backends.local import LocalBackend
from suika.core.cluster import Device
from suika.core.job import parse_job
from suika.core.layout import Layout
from suika.core.plan import Placement, Plan
from suika.runtime.command_run import CommandRun
from suika.runtime.command_start import rank_variables
from suika.runtime.events import Ended, JobEvent, Outcome, Started
from suika.runtime.logs import logs_in, read

from .conftest import CLUSTER

GANG = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
print("sum", int(total), os.environ["LOCAL_RANK"], flush=True)
dist.barrier()
dist.destroy_process_group()
"""
SAVES = """
import os, signal, sys, time
def save(*_):
    open(sys.argv[1] + os.environ["RANK"], "w").write(os.environ["SUIKA_RESTART"])
    sys.exit(0)
signal.signal(signal.SIGUSR1, save)
print("ready", flush=True)
time.sleep(100)
"""
LEAVES_SOME = """
import subprocess, sys, time
nap = [sys.executable, "-c", "import time; time.sleep(100)"]
subprocess.Popen(nap)
subprocess.Popen(nap, start_new_session=True)
print("ready", flush=True)
time.sleep(100)
"""
LETS_GO = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(0.3)
        os._exit(0)
    os.wait()
print("ready", flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBackend]:
    with LocalBackend(CLUSTER, tmp_path_factory.mktemp("machine")) as backend:
        yield backend


class Gang:
    """A run, what it told, and what tests ask of it."""

    def __init__(self, machine: LocalBackend, name: str, command: list[str], devices: str, **spec: Any) -> None:
        self.devices = tuple(Device(text[0], int(text[1])) for text in devices.split())
        size = {"min": len(self.devices), "max": len(self.devices)}
        self.spec = parse_job({"name": name, "command": command, "devices": size} | spec)
        self.events: queue.Queue[JobEvent] = queue.Queue()
        self.run = CommandRun(f"j-{name}", self.spec, machine, CLUSTER, self.events.put)
        self.folder = machine.logs

    def start(self, generation: int = 1) -> None:
        layout = Layout(dp=len(self.devices), layers_per_stage=(1,))
        self.run.start(Plan(layout, Placement(self.devices)), generation)

    def wait(self, kind: type, timeout_s: float = 40.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while True:
            event = self.events.get(timeout=max(deadline - time.monotonic(), 0.01))
            if isinstance(event, kind):
                return event

    def printed(self, rank: int = 0, generation: int = 1) -> str:
        process = f"{self.run.job_id}.{generation}.{self.devices[rank]}"
        return read(self.folder, process, 0, 1 << 20)[0].decode()

    def wait_for_text(self, text: str, generation: int = 1) -> None:
        ranks = range(len(self.devices))
        _until(lambda: all(text in self.printed(rank, generation) for rank in ranks), f"{text} from all")

    def family(self) -> list[psutil.Process]:
        pids = [member.pid for member in self.run.gang.members.values() if member.pid is not None]
        return [p for pid in pids for p in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))]


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def gang(machine: LocalBackend) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make(*arguments: Any, **spec: Any) -> Gang:
        made.append(Gang(machine, *arguments, **spec))
        return made[-1]

    yield make
    for each in made:
        each.run.close()


def test_torch_distributed_finds_what_torchrun_would_give_it(gang: Callable[..., Gang]) -> None:
    run = gang("gloo", [sys.executable, "-c", GANG], "a0 a1 b0")
    run.start()
    assert run.wait(Started).devices == run.devices
    ended = run.wait(Ended, 100)
    assert (ended.outcome, ended.exit_code, ended.step) == (Outcome.FINISHED, 0, 1), run.printed()
    assert [run.printed(rank).split()[-3:] for rank in range(3)] == [
        ["sum", "6", "0"],
        ["sum", "6", "1"],
        ["sum", "6", "0"],
    ]


def test_variables_of_ranks_over_uneven_nodes() -> None:
    devices = (Device("b", 3), Device("a", 1), Device("b", 0))
    first, second, third = rank_variables("j1", 4, devices, "10.0.0.1", 2222)
    names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "SUIKA_DEVICES")
    assert [first[name] for name in names] == ["0", "0", "0", "2", "3,0"]
    assert [second[name] for name in names] == ["1", "0", "1", "1", "1"]
    assert [third[name] for name in names] == ["2", "1", "0", "2", "3,0"]
    for each in (first, second, third):
        shared = ("WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SUIKA_RESTART")
        assert [each[name] for name in shared] == ["3", "2", "10.0.0.1", "2222", "3"]


def test_a_clean_environment_and_no_shell(gang: Callable[..., Gang], tmp_path: Path, monkeypatch: Any) -> None:
    shows = "import json, os, sys; print(json.dumps([dict(os.environ), os.getcwd(), sys.argv[1:]]))"
    environment = {"variables": {"LR": "1e-4 $(id)"}, "workdir": str(tmp_path)}
    monkeypatch.setenv("SECRET", "of the agent's")
    run = gang("clean", [sys.executable, "-c", shows, "$HOME", "; id", "*"], "a0", environment=environment)
    run.start()
    assert run.wait(Ended).exit_code == 0
    variables, folder, arguments = json.loads(run.printed())
    assert (folder, arguments) == (str(tmp_path), ["$HOME", "; id", "*"])
    assert variables["LR"] == "1e-4 $(id)"
    assert "SECRET" not in variables
    assert not {name for name in variables if name.startswith(("PYTHONPATH", "VIRTUAL"))}


def test_virtual_environment_container_and_setup(gang: Callable[..., Gang], tmp_path: Path) -> None:
    program = tmp_path / "venv" / "bin" / "mine"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$VIRTUAL_ENV" >> "$1"\n')
    program.chmod(0o755)
    note = tmp_path / "note"
    environment = {"venv": str(tmp_path / "venv"), "setup": ["mine", str(note)]}
    run = gang("venv", ["mine", str(note)], "a0 a1 b0", environment=environment)
    run.start()
    assert run.wait(Ended).outcome == Outcome.FINISHED
    assert note.read_text().split() == [str(tmp_path / "venv")] * 5, "three ranks, and the setup once per node"


def test_a_container_is_the_start_of_the_command_line(gang: Callable[..., Gang], tmp_path: Path) -> None:
    runtime = tmp_path / "podman"
    runtime.write_text('#!/bin/sh\necho "$A" "$@"\n')
    runtime.chmod(0o755)
    environment = {"container": [str(runtime), "run", "{env}", "image"], "variables": {"A": "secret"}}
    run = gang("inside", ["train", "--lr", "1"], "a0", environment=environment)
    run.start()
    assert run.wait(Ended).exit_code == 0
    value, run_, *options, image, program, _, _ = run.printed().split()
    assert (value, run_, image, program) == ("secret", "run", "image", "train")
    assert {"--env=A", "--env=RANK", "--env=MASTER_PORT", "--env=SUIKA_RESTART"} <= set(options)
    assert all("=" not in option.removeprefix("--env=") for option in options), "values are for its environment alone"
    assert not {"--env=HOME", "--env=PATH"} & set(options)


@pytest.mark.parametrize(
    ("changes", "code", "text"),
    [
        ({"command": ["/no/such/program"]}, 127, "/no/such/program"),
        ({"command": ["/etc/passwd"]}, 126, "does not start"),
        ({"environment": {"workdir": "/no/such/folder"}}, 126, "working directory"),
        ({"environment": {"venv": "/no/such/venv"}}, 126, "no virtual environment"),
        ({"environment": {"setup": ["/bin/sh", "-c", "exit 9"]}}, 9, "set-up"),
        ({"environment": {"setup": ["/bin/sh", "-c", "echo no such disk >&2; exit 9"]}}, 9, "code 9: no such disk"),
    ],
)
def test_what_cannot_start_says_why(gang: Callable[..., Gang], changes: dict[str, Any], code: int, text: str) -> None:
    command = changes.pop("command", ["/bin/true"])
    run = gang("cannot", command, "a0 b0", **changes)
    run.start()
    ended = run.wait(Ended)
    assert (ended.outcome, ended.exit_code) == (Outcome.FAILED, code), ended.error
    assert text in ended.error


def test_one_rank_fails_and_the_gang_ends_with_its_code(gang: Callable[..., Gang]) -> None:
    script = "if [ $RANK = 1 ]; then exit 7; else sleep 100; fi"
    run = gang("fails", ["/bin/sh", "-c", script], "a0 a1 b0")
    run.start()
    began_s = time.monotonic()
    ended = run.wait(Ended)
    assert (ended.outcome, ended.exit_code, ended.dead) == (Outcome.LOST, 7, ())
    assert "rank 1 on a/1 ended with code 7" in ended.error
    assert time.monotonic() - began_s < 12
    run.start(2)  # its owner may start it again
    assert run.wait(Ended).exit_code == 7


def test_a_signalled_rank_has_a_shells_code(gang: Callable[..., Gang]) -> None:
    run = gang("signalled", ["/bin/sh", "-c", "kill -SEGV $$"], "a0")
    run.start()
    assert run.wait(Ended).exit_code == 128 + signal.SIGSEGV


def test_grace_is_enough_to_save(gang: Callable[..., Gang], tmp_path: Path) -> None:
    saved = str(tmp_path / "saved-")
    preemption = {"signal": "SIGUSR1", "grace_s": 30}
    run = gang("saves", [sys.executable, "-c", SAVES, saved], "a0 b0", preemption=preemption)
    assert_saves_in_its_grace(run, saved, most_s=10)


def assert_saves_in_its_grace(run: Gang, saved: str, most_s: float) -> None:
    """Two ranks of `SAVES`, told to stop in their third generation."""
    run.start(3)
    run.wait_for_text("ready", 3)
    began_s = time.monotonic()
    run.run.preempt()
    ended = run.wait(Ended)
    assert (ended.outcome, ended.error) == (Outcome.PREEMPTED, None)
    assert time.monotonic() - began_s < most_s, "nobody waits for the whole grace"
    assert [Path(saved + str(rank)).read_text() for rank in (0, 1)] == ["2", "2"]


@pytest.mark.parametrize("deadline_s", [None, 0.3])
def test_who_does_not_heed_the_signal_is_killed(gang: Callable[..., Gang], deadline_s: float | None) -> None:
    deaf = ["/bin/sh", "-c", "trap '' TERM; echo ready; sleep 100 & wait; wait"]
    run = gang(
        "deaf" if deadline_s is None else "deaf-soon",
        deaf,
        "a0 b0",
        preemption={"grace_s": 0.5 if deadline_s is None else 60},
    )
    run.start()
    run.wait_for_text("ready")
    family = run.family()
    began_s = time.monotonic()
    run.run.preempt(deadline_s)
    ended = run.wait(Ended)
    assert ended.outcome == Outcome.PREEMPTED
    assert "2 of 2 ranks" in ended.error
    assert time.monotonic() - began_s < 12
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_b60_a_notice_while_it_sets_up_is_heard_at_once(gang: Callable[..., Gang]) -> None:
    """What has not begun has nothing to save; nobody waits for its set-up, nor for a grace."""
    run = gang("early", ["/bin/true"], "a0 b0", environment={"setup": ["/bin/sleep", "100"]})
    run.start()
    _until(lambda: sum(len(psutil.Process(p.pid).children()) for p in run.family()) == 2, "its set-up on both nodes")
    family, began_s = run.family(), time.monotonic()
    run.run.preempt(30.0)
    ended = run.wait(Ended)
    assert (ended.outcome, ended.error) == (Outcome.PREEMPTED, None)
    assert time.monotonic() - began_s < 10
    _, left = psutil.wait_procs(family, timeout=10)
    assert not left
    run.start(2)  # and it may be asked to begin again
    run.run.kill()
    assert run.wait(Ended).outcome == Outcome.KILLED


@pytest.mark.parametrize("how", ["kill", "rank", "shepherd"])
def test_nothing_of_a_command_is_left(gang: Callable[..., Gang], how: str) -> None:
    """B54: children asleep, one of them in a session of its own, go within 10 s, whoever was killed."""
    run = gang(f"leaves-{how}", [sys.executable, "-c", LEAVES_SOME], "a0 b1")
    run.start()
    run.wait_for_text("ready")
    family = run.family()
    assert len(family) == 8, "per rank: who stands between, the program, and two of its children"
    first = run.run.ranks[run.devices[0]].pid
    assert first is not None
    if how == "kill":
        run.run.kill()
    elif how == "rank":
        os.kill(psutil.Process(first).children()[0].pid, signal.SIGKILL)
    else:
        os.kill(first, signal.SIGKILL)
    ended = run.wait(Ended)
    expected = {"kill": (Outcome.KILLED, None), "rank": (Outcome.LOST, 137), "shepherd": (Outcome.LOST, None)}[how]
    assert (ended.outcome, ended.exit_code) == expected
    assert ended.dead == ((run.devices[0],) if how == "shepherd" else ())
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_who_stands_between_holds_no_log_open_and_collects_orphans(gang: Callable[..., Gang]) -> None:
    """A rank that held another's log would keep removed parts of it on the disk; a program that forks and lets go
    again and again would fill the process table."""
    run = gang("orphans", [sys.executable, "-c", LETS_GO], "a0 b1")
    run.start()
    run.wait_for_text("ready")
    for member in run.run.ranks.values():
        files = [os.readlink(f"/proc/{member.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{member.pid}/fd")]
        assert not [file for file in files if ".log" in file]
    pids = [member.pid for member in run.run.ranks.values()]
    _until(lambda: all(len(psutil.Process(pid).children()) == 1 for pid in pids), "its five orphans are collected")
    run.run.kill()
    assert run.wait(Ended).outcome == Outcome.KILLED


def test_what_it_prints_is_bounded_and_has_positions(gang: Callable[..., Gang]) -> None:
    script = "for i in range(200_000): print('line', i, 'of a talkative program, over and over again')"
    run = gang("talks", [sys.executable, "-c", script], "a0")
    run.start()
    assert run.wait(Ended).exit_code == 0
    (log,) = logs_in(run.folder, "j-talks.")
    whole = sum(len(f"line {i} of a talkative program, over and over again\n") for i in range(200_000))
    assert log.end == whole
    data, after = read(run.folder, log.process, -100, 1000)
    assert data.decode().splitlines()[-1] == "line 199999 of a talkative program, over and over again"
    assert after == whole
