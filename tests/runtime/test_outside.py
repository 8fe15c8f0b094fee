"""Training jobs in virtual environments of their own: nodes are set up once, ranks are other programs, moves go on."""

from __future__ import annotations

import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import suika
from suika.runtime.coordinator import NotRunningError
from suika.runtime.events import Ended, Outcome

from .conftest import USER, Watched, plan, spec

Run = Callable[..., Watched]
HERE = [Path(suika.__file__).parents[1], Path(__file__).parent]  # Suika, and the tiny program


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own, which finds in ours what it needs."""
    made = tmp_path_factory.mktemp("env") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True, timeout=60)
    (packages,) = made.glob("lib/python*/site-packages")
    ours = [f"import site; site.addsitedir({found!r})\n" for found in site.getsitepackages()]
    (packages / "ours.pth").write_text("".join((*(f"{path}\n" for path in HERE), *ours)))
    return made


def programs(run: Watched) -> set[str]:
    """What the ranks' processes are."""
    pids = [member.pid for member in run.ranks.values()]
    return {Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode() for pid in pids}


@pytest.mark.fault
@pytest.mark.timeout(240)
def test_a_job_in_its_own_environment_moves_as_any_other(run: Run, venv: Path, tmp_path: Path) -> None:
    note = tmp_path / "note"
    setup = ["/bin/sh", "-c", f'echo "$SUIKA_NODE $SUIKA_DEVICES $LR" >> {note}']
    job = spec("own", environment={"venv": str(venv), "setup": setup, "variables": {"LR": "1e-4"}})
    made = run(job)
    made.start(plan("tp=2", "a0 a1", job), 1).result(120)
    assert note.read_text() == "a 0,1 1e-4\n"
    assert programs(made) == {f"{venv}/bin/python"}
    pid = made.pid("a0")
    assert b"LR=1e-4" in Path(f"/proc/{pid}/environ").read_bytes()
    record = made.redeploy(plan("tp=2,dp=2", "a0 a1 b0 b1", job), 2, USER).result(120)
    assert record.error is None
    assert note.read_text() == "a 0,1 1e-4\nb 0,1 1e-4\n", "where the job runs already, nothing is set up again"
    made.wait_steps(3)
    assert made.pid("a0") == pid
    ended = made.preempt().result(60)
    assert (ended.outcome, ended.snapshot_step) == (Outcome.PREEMPTED, ended.step)
    made.start(plan("tp=1", "b0", job), 3, ended.snapshot).result(120)
    assert note.read_text().splitlines()[2:] == ["b 0 1e-4"]
    assert made.step > ended.step


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"setup": ["/bin/sh", "-c", "echo the disk is full >&2; exit 3"]}, "code 3: the disk is full"),
        ({"setup": ["/no/such/program"]}, "/no/such/program"),
        ({"venv": "/no/such/venv"}, "no virtual environment"),
    ],
)
def test_what_cannot_be_set_up_fails_with_its_output(run: Run, environment: dict[str, object], said: str) -> None:
    job = spec("fails", environment=environment)
    made = run(job)
    made.start(plan("tp=1,dp=2", "a0 b0", job), 1)
    ended = made.wait(Ended)
    assert ended.outcome is Outcome.FAILED
    assert ended.error.startswith(("a: ", "b: "))
    assert said in ended.error
    assert not made.gang.members


def test_an_environment_without_suika_says_so(run: Run, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    job = spec("bare", environment={"venv": str(bare)})
    made = run(job)
    made.start(plan("tp=1", "a0", job), 1)
    ended = made.wait(Ended)
    assert ended.outcome is Outcome.FAILED
    assert "No module named 'suika'" in ended.error


def test_a_node_that_cannot_be_set_up_costs_the_move_and_no_more(run: Run) -> None:
    only_a = ["/bin/sh", "-c", "test $SUIKA_NODE = a || { echo no scratch disk; exit 3; }"]
    job = spec("stays", environment={"setup": only_a})
    made = run(job)
    made.start(plan("tp=2", "a0 a1", job), 1).result(60)
    with pytest.raises(NotRunningError, match="no scratch disk"):
        made.redeploy(plan("tp=2", "b0 b1", job), 2, USER).result(60)
    made.wait_steps(3)
    assert made.redeploy(plan("tp=2", "a2 a3", job), 3, USER).result(60).error is None


def test_a_kill_ends_a_set_up(run: Run) -> None:
    job = spec("slow", environment={"setup": ["/bin/sleep", "1000"]})
    made = run(job)
    made.start(plan("tp=1", "a0", job), 1)
    made.kill()
    assert made.wait(Ended).outcome is Outcome.KILLED
