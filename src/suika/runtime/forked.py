"""`Forked`: a child of the fork server: how it comes to be, what it prints, how it is ended. No torch.

The child shares its server's memory, but none of its files: it lets go of them before it runs anything of its own.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from suika.runtime import container
from suika.runtime.descendants import die_with_parent, kill_group
from suika.runtime.logs import RotatingLog, prune
from suika.runtime.messages import Channel, Message

_READ_BYTES = 1 << 16
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Forked:
    """A live child. `channel` is our end of its socket pair, `printed` of its pipe; -1: it has closed it."""

    name: str
    pid: int
    channel: Channel
    printed: int
    log: RotatingLog | None
    outage_s: float | None = None  # it must not outlive the contact to its controller by more
    is_keeper: bool = False  # it stands before a container, which it ends in order when it is asked to
    kill_at_s: float | None = None  # then it has had its time for that

    def end(self) -> None:
        """At once, but for a container: its runtime is given a moment to put its own records in order."""
        if not self.is_keeper:
            kill_group(self.pid)
        elif self.kill_at_s is None:
            self.kill_at_s = time.monotonic() + container.END_WAIT_S
            with suppress(ProcessLookupError):
                os.kill(self.pid, container.END)

    def keep_printed(self, most_reads: int) -> bool:
        """Take what it has printed into its log; each time a little, so that no child's chatter keeps others waiting.
        False: it has closed its end."""
        with suppress(BlockingIOError):
            for _ in range(most_reads):
                data = os.read(self.printed, _READ_BYTES)
                if self.log is not None:
                    self.log.write(data)
                if not data:
                    return False
        return True

    def close_log(self) -> None:
        """Our end of its pipe, and its log."""
        if self.printed >= 0:
            os.close(self.printed)
            self.printed = -1
            if self.log is not None:
                self.log.close()


def fork(order: Message, let_go: Callable[[], None]) -> Forked:
    """A child that runs the `entry` of `order`. It calls `let_go` to drop everything of its server's.

    Raises `OSError` if no process or file is to be had, and leaves nothing open then.
    """
    log = open_log(order)
    try:
        pid, ours, printed = _begin(order, log, let_go)
    except OSError:
        if log is not None:
            log.close()
        raise
    with suppress(OSError):
        os.setpgid(pid, pid)  # the child does it too: whoever comes first, a kill reaches its group
    ours.setblocking(False)
    launch = order["launch"]
    is_keeper = bool(launch.get("environment", {}).get("container"))
    return Forked(order["process"], pid, Channel(ours), printed, log, launch.get("outage_s"), is_keeper)


def open_log(order: Message) -> RotatingLog | None:
    """Where what the child prints goes; None: nowhere."""
    if order.get("log") is None:
        return None
    path = Path(order["log"])
    try:
        prune(path.parent)
        return RotatingLog(path, **order.get("log_limits", {}))
    except OSError as error:  # a full disk: what this child prints is lost, and no other child with it
        print(f"no log for {order['process']}: {error}", file=sys.stderr, flush=True)
        return None


def _begin(order: Message, log: RotatingLog | None, let_go: Callable[[], None]) -> tuple[int, socket.socket, int]:
    """The child's pid, and our ends of its socket pair and its pipe. Raises `OSError`, and leaves nothing open."""
    ours, theirs = socket.socketpair()
    pipe: tuple[int, ...] = ()
    try:
        printed, prints = pipe = os.pipe()
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        for fd in pipe:
            os.close(fd)
        raise
    if pid == 0:
        ours.close()  # or it would never hear that the server is gone
        os.close(printed)
        _become(order, theirs, prints, log, let_go)
    theirs.close()
    os.close(prints)
    os.set_blocking(printed, False)
    return pid, ours, printed


def _become(
    order: Message, theirs: socket.socket, prints: int, log: RotatingLog | None, let_go: Callable[[], None]
) -> NoReturn:
    """In the child: drop everything of the server's, then run the entry. Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        if user := order.get("user"):
            _become_user(user["uid"], user["gid"])
        die_with_parent()
        _redirect(prints)
        os.environ.update(order["launch"].get("variables", {}))
        if log is not None:
            log.close()
        let_go()
        module, _, function = order["entry"].partition(":")
        getattr(importlib.import_module(module), function)(Channel(theirs), order["launch"])
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _become_user(uid: int, gid: int) -> None:
    """For good, with no other groups. The kernel then takes the process for one with secrets, which it is not: it may
    share memory with its like."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _redirect(prints: int) -> None:
    """stdin from nowhere; stdout and stderr into the log's pipe, line by line."""
    source = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((source, 0), (prints, 1), (prints, 2)):
        os.dup2(fd, number)
    os.close(source)
    os.close(prints)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # both are files
