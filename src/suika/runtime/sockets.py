"""Breaking connections from outside: a gloo call that waits for a dead peer raises at once when its sockets are shut.

Gloo itself offers no way: `abort` and `shutdown` leave a blocked receive blocked, and only direct neighbours of a dead
rank notice anything. A listening TCP socket is spared, because gloo ends the process when its own fails.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

from torch.distributed import DistNetworkError

from suika.reshard.transports.base import TransportError

_GLOO = "gloo/transport"  # the source that all of gloo's complaints about connections name


class SocketWatch:
    """The sockets that this process opened since the watch began and until it was closed."""

    def __init__(self) -> None:
        self._before = _open_sockets()
        self._mine: dict[int, str] | None = None

    def close(self) -> None:
        """What is opened from now on belongs to others."""
        self._mine = self._opened()

    def break_connections(self) -> None:
        """Shut the watched connections down, from any thread: whoever waits on one raises now."""
        present = _open_sockets()
        for fd, inode in (self._opened() if self._mine is None else self._mine).items():
            if present.get(fd) == inode:  # still the same socket: numbers are used again
                with suppress(OSError):
                    _shut_down(fd)

    def _opened(self) -> dict[int, str]:
        return {fd: inode for fd, inode in _open_sockets().items() if self._before.get(fd) != inode}


def is_broken_link(error: BaseException) -> bool:
    """Whether a transport, gloo or torch's store complains that it cannot reach a peer: no fault of the program's."""
    return isinstance(error, TransportError | DistNetworkError) or (
        isinstance(error, RuntimeError) and _GLOO in str(error)
    )


def _open_sockets() -> dict[int, str]:
    """Descriptor -> `socket:[inode]` of every socket of this process."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def _shut_down(fd: int) -> None:
    with socket.socket(fileno=os.dup(fd)) as same:
        if not same.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            same.shutdown(socket.SHUT_RDWR)
        elif same.family == socket.AF_UNIX:  # wake whoever accepts, with a caller that hangs up
            with socket.socket(same.family, same.type) as caller:
                caller.setblocking(False)
                caller.connect(same.getsockname())
