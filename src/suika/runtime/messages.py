"""JSON-lines messages on stream sockets, and what the runtime's processes say to each other. No torch here.

One hub per machine, the fork server, passes messages between an owner (a controller's backend) and the processes
that it forked. An envelope owner -> hub is `{"do": fork | send | kill | shutdown, "process": name, ...}`, an envelope
hub -> owner `{"event": hello | forked | message | exit, "process": name, ...}`. What coordinator and ranks say to each
other travels inside as `message` and carries the job's uuid, the generation and the move's digest.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from suika.runtime.rooms import Rooms

Message = dict[str, Any]


class DisconnectedError(ConnectionError):
    """The other end of a channel is gone."""


class Channel:
    """Whole messages over a connected stream socket. Any thread may send, one thread receives.

    `send` blocks until the kernel has the bytes. A hub that must never block uses `post` and `flush` instead, on a
    non-blocking socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Raises `DisconnectedError`."""
        with self._sending:
            try:
                self._socket.sendall(_encode(message))
            except OSError as error:
                raise DisconnectedError(str(error)) from None

    def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises `TimeoutError`, or `DisconnectedError` once everything sent has been received."""
        self._socket.settimeout(timeout_s)
        while b"\n" not in self._incoming:
            self._read()
        return self._take()

    def post(self, message: Mapping[str, Any]) -> None:
        """Queue a message and write what the kernel takes at once; the rest goes out at the next `flush`."""
        self._outgoing += _encode(message)
        self.flush()

    def flush(self) -> None:
        """Raises `DisconnectedError`."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError as error:
            raise DisconnectedError(str(error)) from None

    @property
    def has_outgoing(self) -> bool:
        return bool(self._outgoing)

    def arrived(self) -> Iterator[Message]:
        """All messages that are there now, without waiting. Raises `DisconnectedError` after the last one."""
        gone = None
        try:
            while True:
                self._read()
        except BlockingIOError:
            pass
        except DisconnectedError as error:
            gone = error
        while b"\n" in self._incoming:
            yield self._take()
        if gone is not None:
            raise gone

    def close(self) -> None:
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as error:
            raise DisconnectedError(str(error)) from None
        if not data:
            raise DisconnectedError("the other end closed the connection")
        self._incoming += data

    def _take(self) -> Message:
        line, _, rest = self._incoming.partition(b"\n")
        self._incoming = bytearray(rest)
        message = json.loads(line)
        assert isinstance(message, dict), f"not a message: {line[:80]!r}"
        return message


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class Processes(Protocol):
    """What a job's coordinator needs of the machines that its processes run on. `LocalBackend` is one. `rooms`: what
    copies in memory may take of them.

    `listener` is called on the backend's own thread with `{"event": "forked" | "message" | "exit", "process", ...}`,
    in the order in which things happened; an exit comes last and exactly once, with `code` as `subprocess` gives it.
    """

    rooms: Rooms

    def spawn(
        self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Callable[[Message], None]
    ) -> None: ...

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        """Never raises for a process that is gone: its exit has been or will be reported."""
        ...

    def ping(self, processes: Collection[str]) -> None:
        """Ask for a sign of life of each."""
        ...

    def kill(self, process: str) -> None:
        """SIGKILL the process and all that it started."""
        ...

    def unanswered_s(self, process: str) -> float:
        """For how long the process is known to have had its last ping, in seconds; 0: it may be on its way, or its
        answer be held up where it is not the process's fault."""
        ...


def listen(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, readable by this user only."""
    server = socket.socket(socket.AF_UNIX)
    with _short(path) as address:
        old_mask = os.umask(0o177)
        try:
            server.bind(address)
        finally:
            os.umask(old_mask)
    server.listen()
    return server


def connect(path: Path) -> socket.socket:
    """Raises `OSError` when nobody listens there."""
    client = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as address:
            client.connect(address)
    except OSError:
        client.close()
        raise
    return client


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name of at most 108 bytes for a socket path of any length: through a descriptor of its folder."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
