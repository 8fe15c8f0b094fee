"""The door: one answer per request, users' mistakes as such, and no request that takes it down."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path

import pytest

from suika.control.client import ControllerFaultError, NoControllerError, call
from suika.control.server import MAX_REQUEST_BYTES, SocketServer, answer
from suika.core.errors import SpecError


def add(a: int, b: int = 1) -> int:
    return a + b


def refuse() -> None:
    raise SpecError("job.name", "x y", "is not a name", "drop the space")


def break_down() -> None:
    raise RuntimeError("ours")


CALLS = {"add": add, "refuse": refuse, "break": break_down}


@pytest.fixture
def door(tmp_path: Path):
    server = SocketServer(tmp_path / ("long" * 40) / "controller.sock", CALLS)  # longer than a socket address may be
    yield server.path
    server.close()
    assert not server.path.exists()


def test_answers_and_mistakes_reach_the_caller(door: Path) -> None:
    assert call("add", door, a=2, b=3) == 5
    with pytest.raises(SpecError) as mistake:
        call("refuse", door)
    assert (mistake.value.field, mistake.value.fix) == ("job.name", "drop the space")
    with pytest.raises(ControllerFaultError, match="ours"):
        call("break", door)
    with pytest.raises(SpecError, match="known: add"):
        call("nothing", door)
    with pytest.raises(SpecError, match="unexpected keyword"):
        call("add", door, a=1, c=2)


def test_only_its_user_may_open_the_socket(door: Path) -> None:
    assert stat.S_IMODE(door.stat().st_mode) == 0o600
    assert stat.S_IMODE(door.parent.stat().st_mode) == 0o700


def test_many_clients_at_once(door: Path) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda i=i: results.append(call("add", door, a=i))) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == list(range(1, 41))


BAD = [b"", b"\n", b"null\n", b"[]\n", b"{}\n", b'{"call": 3, "with": {}}\n', b'{"call": "add", "with": []}\n']
WORSE = [b"\xff\xfe{\n", b'{"call": "add", "with": {"a": 1}, "more": 1}\n', b"[" * 5000, b"x" * (MAX_REQUEST_BYTES + 1)]


@pytest.mark.parametrize("line", [*BAD, *WORSE], ids=range(11))
def test_a_bad_request_is_an_answer(line: bytes) -> None:
    reply = json.loads(answer(CALLS, line))
    assert set(reply) == {"error"}


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(NoControllerError, match="suika up"):
        call("add", tmp_path / "none.sock", a=1)
