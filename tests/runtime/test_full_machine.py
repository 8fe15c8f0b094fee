"""A machine without room for one more process: what runs already runs on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from suika.runtime.gang import NOT_STARTED
from suika.runtime.hub import Hub
from suika.runtime.messages import listen


def test_a_fork_that_fails_ends_one_process_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room() -> int:
        raise BlockingIOError(errno.EAGAIN, "no process to be had")

    listener, told = listen(tmp_path / "socket"), []
    server: Any = Hub(listener)
    server._owner = SimpleNamespace(post=told.append)
    monkeypatch.setattr(os, "fork", no_room)
    monkeypatch.setattr("suika.runtime.hub._num_threads", lambda: 1)
    before = len(os.listdir("/proc/self/fd"))
    order = {"process": "j1.1.n0/0", "entry": "none:none", "launch": {}, "log": str(tmp_path / "a.log")}
    server._fork(order)
    assert told == [{"event": "exit", "process": "j1.1.n0/0", "code": NOT_STARTED}]
    assert len(os.listdir("/proc/self/fd")) == before
    assert not server._by_name
    listener.close()
