"""A process and those that it started: who ends with whom, and how nothing is left behind. Linux alone; no torch.

Whoever calls these has one thread: the kernel keeps children, and the parent whose death counts, by thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_END_WAIT_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Descendants whose parents have died become children of this process (a subreaper)."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """The kernel kills this process when its parent ends, however that happens."""
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it ended in between


def outlive_parent() -> None:
    """From now on this process notices its parent's end by itself: it has others to end before it goes."""
    _libc.prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)


def children() -> list[int]:
    """Pids of this process's children."""
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def kill_group(pid: int) -> None:
    """SIGKILL a child and all in its process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def collect_orphans(spared: int | None) -> None:
    """Adopted processes that have ended would stay zombies: nobody else collects them. `spared` is waited for
    elsewhere."""
    for pid in children():
        if pid != spared:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def end_children(collect: bool = True) -> None:
    """SIGKILL all descendants, those that left their group or session too: they are our children as soon as their
    parents are gone. Without `collect` the direct ones are left to be waited for."""
    deadline = time.monotonic() + _END_WAIT_S
    while (pids := children()) and time.monotonic() < deadline:
        for pid in pids:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        if not collect:
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)
