"""Jobs in real containers: what they find, how they move, how they are told to end; nothing of them is left."""

from __future__ import annotations

import json
import os
import pwd
import queue
import shutil
import signal
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from suika.agent.forks import ForkServerClient, end_fork_server
from suika.backends.local import LocalBackend
from suika.core.environment import Environment
from suika.core.job import JobSpec
from suika.runtime.coordinator import PROGRAM
from suika.runtime.events import Ended, Outcome, Started, StepDone
from suika.runtime.gang import COMMAND_ENTRY, Limits
from suika.runtime.logs import path_of
from suika.runtime.messages import Message
from suika.train.data import prepare

from .conftest import CLUSTER, USER, Watched, plan, spec
from .containers import RUNTIMES, container, forget, inside_variables, namespace, records
from .test_commands import GANG, LEAVES_SOME, SAVES, Gang, assert_saves_in_its_grace
from .test_moves import assert_state_is_exact

pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]
SHOWS = "import json, os; print(json.dumps([dict(os.environ), os.getpid(), os.readlink('/proc/self/ns/pid')]))"
CHAIN = [
    ("tp=2", "a0 a1"),
    ("tp=2,dp=2", "a0 a1 b0 b1"),  # grow
    ("pp=3", "a1 b0 b3"),  # other axes; ranks of a node look into each other's memory
    ("tp=1,dp=2", "b0 a2"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that any user may enter."""
    folder = Path(tempfile.mkdtemp(prefix="suika-containers-", dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def old_records() -> Iterator[set[str]]:
    """What podman had on record before the test, and has after it."""
    before = records()
    yield before
    forget(records() - before)


@pytest.fixture(params=RUNTIMES)
def inside(request: pytest.FixtureRequest, place: Path) -> dict[str, Any]:
    """A job's environment: one kind of container."""
    start = container(request.param, place)
    return {"container": start, "variables": inside_variables(), "workdir": str(place)}


@pytest.fixture
def make(backend: LocalBackend, place: Path) -> Iterator[Callable[..., Watched]]:
    """Training jobs, which keep what they write in `place`."""
    made: list[Watched] = []

    def begin(job: JobSpec, **more: Any) -> Watched:
        made.append(Watched(job, backend, place, **{"limits": Limits(), **more}))
        return made[-1]

    yield begin
    for job in made:
        job.close()


@pytest.fixture
def gang(backend: LocalBackend) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def begin(name: str, *arguments: Any, **more: Any) -> Gang:
        made.append(Gang(backend, f"{name}-{os.urandom(3).hex()}", *arguments, **more))  # logs go on under a name
        return made[-1]

    yield begin
    for each in made:
        each.run.close()


def below(backend: LocalBackend) -> list[psutil.Process]:
    return psutil.Process(backend.server_pid).children(recursive=True)


def ranks_inside(backend: LocalBackend) -> list[int]:
    """Pids of the processes in containers that hold a line to their coordinator: ranks and stores."""
    own = namespace(os.getpid())
    found = [p for p in below(backend) if namespace(p.pid) != own]
    return [p.pid for p in found if p.cmdline()[1:] == ["-m", "suika.runtime.outside"]]


def assert_all_gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive


def test_a_training_job_moves_between_containers_and_keeps_every_bit(
    backend: LocalBackend, make: Callable[..., Watched], inside: dict[str, Any], place: Path
) -> None:
    note = place / "note"
    setup = ["sh", "-c", f'echo "$SUIKA_NODE $SUIKA_DEVICES $LR" >> {note}']
    variables = {**inside["variables"], "LR": "1e-4 $x"}
    job = spec("contained", environment=inside | {"setup": setup, "variables": variables})
    run = make(job)
    run.start(plan(*CHAIN[0], job), 1).result(240)
    assert note.read_text() == "a 0,1 1e-4 $x\n"
    contained = ranks_inside(backend)
    assert len(contained) == 3, "two ranks and their store"
    for kind in ("pid", "ipc", "uts", "mnt"):
        assert len({namespace(pid, kind) for pid in (*contained, os.getpid())}) == 4, f"{kind}: each its own"
    assert all(b"LR=1e-4 $x" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in contained)
    assert all("1e-4" not in " ".join(p.cmdline()) for p in below(backend)), "others can read command lines"
    for generation, target in enumerate(CHAIN[1:], start=2):
        record = run.redeploy(plan(*target, job), generation, USER).result(240)
        assert record.error is None
        run.wait_steps(3)
    ended = run.preempt().result(60)
    assert (ended.outcome, ended.steps_lost) == (Outcome.PREEMPTED, 0)
    assert_state_is_exact(Path(ended.snapshot), job, ended.step)
    assert not below(backend)


def test_the_trainer_in_moved_containers_is_the_unmoved_twin_to_the_bit(
    backend: LocalBackend, make: Callable[..., Watched], inside: dict[str, Any], place: Path
) -> None:
    data = place / "stdlib.bin"
    prepare(sysconfig.get_paths()["stdlib"], data, pattern="*.py", max_bytes=100_000)
    model = {"family": "llama", "layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}
    rest = {"model": model, "global_batch": 8, "sequence_length": 16, "steps": 2000, "seed": 3}

    def begin(name: str, **more: Any) -> tuple[JobSpec, Watched]:
        job = spec(name, **rest, **more)
        run = make(job, program=PROGRAM, data_path=str(data))
        run.start(plan("tp=2", "a0 a1", job), 1).result(240)
        return job, run

    def losses(run: Watched) -> dict[int, tuple[float, float]]:
        return {event.step: (event.loss, event.grad_norm) for event in list(run.events) if isinstance(event, StepDone)}

    job, moved = begin("moved", environment=inside)
    for generation, devices in ((2, "a1 a0"), (3, "b0 b1")):  # the same pages, then other containers
        assert moved.redeploy(plan("tp=2", devices, job), generation, USER).result(240).error is None
        moved.wait_steps(3)
    moved.close()
    _, twin = begin("twin")
    twin.wait_steps(moved.step - twin.step, 60)
    twin.close()
    expected = losses(twin)
    assert len(losses(moved)) == moved.step > 6
    assert all(expected[step] == found for step, found in losses(moved).items())


@pytest.mark.parametrize("how", ["stopped", "dead", "keeper", "killed"])
def test_a_rank_that_is_stopped_or_dead_is_noticed_and_nothing_is_left(
    old_records: set[str], backend: LocalBackend, make: Callable[..., Watched], inside: dict[str, Any], how: str
) -> None:
    job = spec("lost", environment=inside)
    run = make(job)
    run.start(plan("tp=2", "a0 b0", job), 1).result(240)
    family = below(backend)
    _, *ranks = ranks_inside(backend)
    if how == "stopped":
        os.kill(run.pid("a0"), signal.SIGSTOP)  # its keeper: the rank goes on, and says so
        run.wait_steps(100)
        os.kill(run.pid("a0"), signal.SIGCONT)
        os.kill(ranks[0], signal.SIGSTOP)
    elif how == "dead":
        os.kill(ranks[0], signal.SIGKILL)
    elif how == "keeper":
        os.kill(run.pid("a0"), signal.SIGKILL)
    else:
        run.kill()
    ended = run.wait(Ended, timeout_s=60)
    assert ended.outcome == (Outcome.KILLED if how == "killed" else Outcome.LOST), ended.error
    assert_all_gone(family)
    assert how == "keeper" or records() == old_records, "the runtime has put its own records in order"


def test_a_gang_in_containers_finds_what_torchrun_gives(gang: Callable[..., Gang], inside: dict[str, Any]) -> None:
    run = gang("gloo", ["python3", "-c", GANG], "a0 a1 b0", environment=inside)
    run.start()
    assert run.wait(Started, 60).devices == run.devices
    ended = run.wait(Ended, 100)
    assert (ended.outcome, ended.exit_code) == (Outcome.FINISHED, 0), run.printed()
    assert [run.printed(rank).split()[-3:] for rank in range(3)] == [
        ["sum", "6", "0"],
        ["sum", "6", "1"],
        ["sum", "6", "0"],
    ]


def test_a_command_has_its_variables_and_its_code(gang: Callable[..., Gang], inside: dict[str, Any]) -> None:
    ends = "exit(7 if os.environ['RANK'] == '0' else 0)"
    run = gang("shows", ["python3", "-c", f"{SHOWS}; {ends}"], "a0 b1", environment=inside)
    run.start()
    assert run.wait(Ended, 60).exit_code == 7
    variables, pid, own = json.loads(run.printed().splitlines()[0])
    assert own != namespace(os.getpid())
    assert pid < 10, "a pid namespace of its own"
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["SUIKA_DEVICES"]) == ("0", "2", "0")


def test_grace_reaches_the_program_inside(gang: Callable[..., Gang], inside: dict[str, Any], place: Path) -> None:
    preemption = {"signal": "SIGUSR1", "grace_s": 60}
    command = ["python3", "-c", SAVES, str(place / "saved-")]
    run = gang("saves", command, "a0 b0", preemption=preemption, environment=inside)
    assert_saves_in_its_grace(run, str(place / "saved-"), most_s=20)


def test_who_does_not_heed_the_signal_is_killed_inside(
    backend: LocalBackend, gang: Callable[..., Gang], inside: dict[str, Any]
) -> None:
    deaf = ["sh", "-c", "trap '' TERM; echo ready; sleep 100 & wait; wait"]
    run = gang("deaf", deaf, "a0 b0", preemption={"grace_s": 0.5}, environment=inside)
    run.start()
    run.wait_for_text("ready")
    family = below(backend)
    run.run.preempt()
    ended = run.wait(Ended)
    assert ended.outcome == Outcome.PREEMPTED
    assert "2 of 2 ranks" in ended.error
    assert_all_gone(family)


@pytest.mark.parametrize("how", ["kill", "rank", "shepherd", "node"])
def test_nothing_of_a_contained_command_is_left(
    inside: dict[str, Any], place: Path, old_records: set[str], how: str
) -> None:
    """Children asleep, one of them in a session of its own, whoever was killed; the fork server is one of them."""
    with LocalBackend(CLUSTER, place / "machine") as backend:
        run = Gang(backend, "leaves", ["python3", "-c", LEAVES_SOME], "a0 b1", environment=inside)
        run.start()
        run.wait_for_text("ready")
        family = below(backend)
        first = run.run.ranks[run.devices[0]].pid
        assert first is not None
        if how == "kill":
            run.run.kill()
        elif how == "rank":
            os.kill(next(p.pid for p in family if LEAVES_SOME in p.cmdline()[2:3]), signal.SIGKILL)
        else:
            os.kill(first if how == "shepherd" else backend.server_pid, signal.SIGKILL)
        ended = run.wait(Ended)
        assert ended.outcome == (Outcome.KILLED if how == "kill" else Outcome.LOST), ended.error
        assert how != "rank" or ended.exit_code == 128 + signal.SIGKILL
        assert_all_gone(family)
        assert how == "shepherd" or records() == old_records
        run.run.close()


def test_a_contained_command_ends_when_its_node_has_lost_its_controller(
    inside: dict[str, Any], place: Path, old_records: set[str]
) -> None:
    """The agent's fork server outlives the agent; the command may not outlive its contact by more than its outage."""
    told: queue.Queue[Message] = queue.Queue()
    forks, process, log = ForkServerClient(place / "node", orphan_limit_s=300), "j-alone.1.a/0", place / "alone.log"
    forks.start(told.put, lambda: None)
    server = psutil.Process(told.get(timeout=120)["pid"])
    try:
        environment = Environment(**inside).model_dump(mode="json")
        launch = {"job_id": "j-alone", "generation": 1, "command": ["python3", "-c", LEAVES_SOME], "outage_s": 5.0}
        order = {"do": "fork", "process": process, "entry": COMMAND_ENTRY, "log": str(log)}
        forks.order({"do": "seen"})
        forks.order(order | {"launch": launch | {"environment": environment}})
        forks.order({"do": "send", "process": process, "message": {"do": "start", "variables": {"SUIKA_DEVICES": "0"}}})
        deadline = time.monotonic() + 60
        while "ready" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline
            forks.order({"do": "seen"})
            time.sleep(0.2)
        family = server.children(recursive=True)
        assert len(family) > 4
        assert_all_gone(family)
        assert records() == old_records
        assert server.is_running()
    finally:
        end_fork_server(place / "node")
        forks.close()


def _instead(start: list[str], option: str) -> list[str]:
    name = option.partition("=")[0]
    return [option if word.partition("=")[0] == name else word for word in start]


@pytest.mark.parametrize("missing", ["descriptor", "network"])
def test_a_container_that_cannot_run_ranks_says_what_it_lacks(
    make: Callable[..., Watched], inside: dict[str, Any], missing: str
) -> None:
    start = inside["container"]
    if missing == "network":
        start = [start[0], "--unshare-net", *start[1:]] if start[0] == "bwrap" else _instead(start, "--network=none")
        said = "a network of its own"
    else:
        closes = ["sh", "-c", 'exec 3<&-; exec "$@"', "sh"]
        start = [*start, *closes] if start[0] == "bwrap" else _instead(start, "--preserve-fds=0")
        said = "--preserve-fds=1"
    job = spec("lacks", environment=inside | {"container": start})
    run = make(job)
    run.start(plan("tp=1", "a0", job), 1)
    ended = run.wait(Ended)
    assert ended.outcome == Outcome.FAILED
    assert said in ended.error


class _OtherUser(LocalBackend):
    """A machine whose jobs' processes are another user's, as `suika agent --user` has it."""

    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())

    def _order(self, order: Message) -> None:
        super()._order({**order, "user": {"uid": self.user.pw_uid, "gid": self.user.pw_gid}})


def test_a_container_is_the_users_that_jobs_run_as(place: Path) -> None:
    """bubblewrap alone: podman without root needs a range of users that the machine must have been given."""
    inside = {"container": container("bubblewrap", place, python=False), "workdir": str(place)}
    shows = f"touch {place}/mine; trap 'echo told; exit 0' TERM; echo ready $(id -u); sleep 100 & wait"
    with _OtherUser(CLUSTER, place / "machine") as backend:
        run = Gang(backend, "whose", ["/bin/sh", "-c", shows], "a0", environment=inside)
        run.start()
        run.wait_for_text("ready")
        family = below(backend)
        assert {p.uids().real for p in family} == {backend.user.pw_uid}
        run.run.preempt()
        assert run.wait(Ended).error is None
        assert run.printed().split() == ["ready", str(backend.user.pw_uid), "told"]
        assert (place / "mine").stat().st_uid == backend.user.pw_uid
        assert_all_gone(family)
        run.run.close()
    log = path_of(backend.logs, f"{run.run.job_id}.1.a/0")
    assert log.stat().st_uid == os.geteuid(), "logs stay the agent's"
