"""When the owner goes, however it goes, everything goes: no process, no socket, no port, no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from suika.backends.local import LocalBackend

from .conftest import CLUSTER, plan, spec

pytestmark = pytest.mark.fault
OWNER = """
import sys, time
from pathlib import Path
from tests_runtime import CLUSTER, LocalBackend, Watched, plan, spec
folder = Path(sys.argv[1])
with LocalBackend(CLUSTER, folder, environment={"PYTHONPATH": sys.argv[2]}) as backend:
    job = spec(snapshot_every_steps=5)
    run = Watched(job, backend, folder)
    run.start(plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), 1).result(60)
    print(backend.server_pid, flush=True)
    time.sleep(100)
"""


def _shared_memory() -> set[str]:
    """What lies in shared memory, but for measured restarts, which others may be running."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("suika-restart-")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_the_owner(tmp_path: Path, number: int) -> None:
    here = Path(__file__).parent
    shared_memory = _shared_memory()
    script = OWNER.replace("from tests_runtime import", "from conftest import")
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), str(here)],
        env={**os.environ, "PYTHONPATH": str(here)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert owner.stdout is not None
    try:
        server = psutil.Process(int(owner.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        assert len(family) == 6, "the server, a store and four ranks"
        ports = {c.laddr.port for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert ports
        os.killpg(owner.pid, number)  # as a terminal's Ctrl-C does; the fork server is in another session
        owner.wait(20)
    finally:
        owner.kill()
        owner.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not (tmp_path / "forkserver.sock").exists()
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert not ports & listening
    assert not _shared_memory() - shared_memory


def test_ranks_die_with_their_fork_server(tmp_path: Path) -> None:
    from suika.runtime.events import Ended, Outcome

    from .conftest import Watched

    here = str(Path(__file__).parent)
    with LocalBackend(CLUSTER, tmp_path, environment={"PYTHONPATH": here}) as backend:
        job = spec()
        run = Watched(job, backend, tmp_path)
        run.start(plan("tp=1,pp=1,dp=2", "a0 b0", job), 1).result(60)
        server = psutil.Process(backend.server_pid)
        family = server.children(recursive=True)
        server.kill()
        assert run.wait(Ended, timeout_s=5).outcome == Outcome.LOST
        _, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
        run.close()


def test_orphans_of_a_dead_rank_go_with_it(backend: LocalBackend) -> None:
    """B54: four loaders asleep, and a grandchild that has left the process group and whose parent is gone."""
    events = []
    backend.spawn("loader", "a", "orphans:sleep_with_children", {}, events.append)
    deadline = time.monotonic() + 10
    while len(events) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    rank, left = events[0]["pid"], events[1]["message"]["left"]
    family = [*psutil.Process(rank).children(recursive=True), psutil.Process(left)]
    assert len({p.pid for p in family}) >= 5
    os.kill(rank, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    deadline = time.monotonic() + 10
    while len(events) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [event["event"] for event in events] == ["forked", "message", "exit"]
    assert events[-1]["code"] == -signal.SIGKILL
