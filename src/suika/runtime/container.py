"""Containers: how their runtime (podman, apptainer, bubblewrap, ..) is called, watched and ended. No torch.

A job file names the start of a command line. What we start is the runtime's client; the job's process is somewhere
below it, or below a monitor that the client has let go of (podman's conmon), in namespaces of its own. So a process of
ours, the keeper, stands before each container: it adopts what is let go of, passes signals on to where they are heard,
and ends everything when the client ends or the fork server does. What runs inside goes first, so that the runtime may
still put its own records in order.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from suika.core.environment import ENV_ITEM
from suika.runtime.descendants import (
    adopt_orphans,
    children,
    collect_orphans,
    die_with_parent,
    end_children,
    outlive_parent,
)
from suika.runtime.messages import Channel

LINE = 3  # the descriptor that containers hand on to what they run
END = signal.SIGHUP  # the fork server asks a keeper to end its container
END_WAIT_S = 4.0  # and kills it if it has not done so
LOOK_EVERY_S = 3.0  # for adopted processes that have ended
TIDY_S = 2.0  # for a runtime that puts its records in order
_OWN = {"HOME", "PATH", "USER", "LOGNAME", "SHELL"}  # who and where: the container knows better


def command_line(container: Sequence[str], command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """The container's start, if there is one, then the command. Values stay out of it: others can read it."""
    start: list[str] = []
    for word in container:
        start += [f"--env={name}" for name in sorted(set(variables) - _OWN)] if word == ENV_ITEM else [word]
    return [*start, *command]


def hand_on(line: socket.socket | Channel) -> None:
    """From now on `line` is this process's descriptor `LINE`, whatever that was, and that of what it executes. In a
    child of `subprocess` the parent has that descriptor open, so that nothing of its own lies there, and names it in
    `pass_fds`."""
    os.dup2(line.fileno(), LINE)


def run(argv: Sequence[str], variables: Mapping[str, str], folder: str, line: Channel) -> int:
    """Run a container to its end, with `line` as its descriptor `LINE`; nothing of it is left. Returns its exit code,
    that of a signal as shells have it. It is ended when `END` comes, or when the line is cut. Raises `OSError`.

    The caller is the process that keeps it: it has one thread, and goes afterwards."""
    hand_on(line)  # before anything else is opened there
    adopt_orphans()
    outlive_parent()
    watched = select.poll()
    watched.register(end_requests(), select.POLLIN)
    watched.register(line, 0)  # its hang-up alone: what is said there is for the process inside
    child = subprocess.Popen(argv, env=variables, cwd=folder, pass_fds=(LINE,), preexec_fn=die_with_parent)
    try:
        signal.signal(signal.SIGTERM, lambda *_: signal_inside(child.pid, signal.SIGTERM))
        watched.register(os.pidfd_open(child.pid), select.POLLIN)
        while not watched.poll(LOOK_EVERY_S * 1000):
            collect_orphans(child.pid)
        code = child.poll()
    finally:
        end()
    return 128 + signal.SIGKILL if code is None else code if code >= 0 else 128 - code


def end_requests() -> int:
    """A descriptor that can be read from when `END` has come."""
    asked, asks = os.pipe()
    os.set_blocking(asks, False)

    def note(*_: object) -> None:
        with suppress(BlockingIOError):
            os.write(asks, b"!")

    signal.signal(END, note)
    return asked


def end() -> None:
    """End this process's containers, then their runtimes, which first get a moment to put their records in order."""
    kill_inside()
    deadline = time.monotonic() + TIDY_S
    while children() and time.monotonic() < deadline:
        collect_orphans(None)
        time.sleep(0.01)
    end_children()


def kill_inside() -> bool:
    """SIGKILL what runs in containers below this process. False: nothing does."""
    found = [pid for pid in _family(os.getpid()) if _is_inside(pid)]
    for pid in found:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return bool(found)


def signal_inside(client: int, number: int) -> None:
    """Send a signal to the first process, from a container's client on down, that hears it: a client that passes
    signals on (podman), or the job's own process below one that would only die of it (bubblewrap)."""
    pid = next((pid for pid in _family(client) if _hears(pid, number)), client)
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _family(first: int) -> Iterator[int]:
    """`first` and its descendants that are there, parents before children."""
    waiting = deque([first])
    while waiting:
        pid = waiting.popleft()
        yield pid
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{pid}/task"):
                waiting.extend(int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split())


def _hears(pid: int, number: int) -> bool:
    """Whether it catches the signal; or, in a container, is not the first process of its pid namespace, from which the
    kernel keeps what it does not catch."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return False
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    if int(status["SigCgt"], 16) >> (number - 1) & 1:
        return True
    return _is_inside(pid) and status["NSpid"].split()[-1] != "1"


def _is_inside(pid: int) -> bool:
    """Whether it sees other files than we do: it is in a container."""
    try:
        return os.readlink(f"/proc/{pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
    except PermissionError:  # it is somebody else's there
        return True
    except OSError:  # it has ended
        return False


def line_problem() -> str | None:
    """Asked inside a container that was begun with a socket as `LINE`: what its start must have and has not."""
    try:
        with socket.socket(fileno=os.dup(LINE)):
            inode = str(os.fstat(LINE).st_ino)
    except OSError:
        return "does not hand descriptor 3 on: podman wants --preserve-fds=1; apptainer and bubblewrap do it unasked"
    try:
        sockets = Path("/proc/self/net/unix").read_text().splitlines()[1:]  # of this network namespace
    except OSError:
        return "has no /proc: bubblewrap wants --proc /proc"
    if inode not in (line.split()[6] for line in sockets):
        return "has a network of its own, but ranks meet on their node's: podman wants --network=host"
    return None
