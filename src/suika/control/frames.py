"""Frames between a process and its owner, on pipes: 8 bytes of length, then the content.

The process waits for its owner as long as it takes (`read`, `write`). The owner waits for the process only as long as
that works (`send`, `receive`): one that was stopped, or hangs, must not stop the owner too.
"""

from __future__ import annotations

import os
import select
import struct
import time
from pathlib import Path
from typing import IO

_LENGTH = struct.Struct(">Q")
_STILL_S = 10.0  # a process that uses no processor time for so long, though it is waited for, hangs
_LOOK_EVERY_S = 1.0


class TooLongError(RuntimeError):
    """The process works, but has not answered in time."""


def write(pipe: IO[bytes], content: bytes) -> None:
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def read(pipe: IO[bytes]) -> bytes:
    """Raises `EOFError` when the other end is closed."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return _exactly(pipe, length)


def _exactly(pipe: IO[bytes], num_bytes: int) -> bytes:
    content = pipe.read(num_bytes)
    if len(content) != num_bytes:
        raise EOFError("the pipe is closed")
    return content


class Patience:
    """How long a process is waited for: `most_s`, as long as it works."""

    def __init__(self, pid: int, most_s: float) -> None:
        self._pid = pid
        self._deadline_s = time.monotonic() + most_s
        self._used, self._used_at_s = -1, 0.0

    def check(self) -> None:
        """Raises `EOFError` for a process that is as good as gone, `TooLongError` for one that takes too long."""
        now, used = time.monotonic(), _processor_ticks(self._pid)
        if used != self._used:
            self._used, self._used_at_s = used, now
        if now - self._used_at_s > _STILL_S:
            raise EOFError("the process hangs")
        if now > self._deadline_s:
            raise TooLongError


def _processor_ticks(pid: int) -> int:
    """What the process has used so far; raises `OSError` if it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])  # in user and in kernel mode


def ready(pipe: IO[bytes], wait_s: float, event: int = select.POLLIN) -> bool:
    """Whether the pipe can be read from, or has ended, within so long."""
    poll = select.poll()  # `select` knows no descriptor above 1023, and a controller of many connections has such
    poll.register(pipe, event)
    return bool(poll.poll(wait_s * 1000))


def send(pipe: IO[bytes], content: bytes, patience: Patience) -> None:
    """To a process that may hang."""
    os.set_blocking(pipe.fileno(), False)
    left = memoryview(_LENGTH.pack(len(content)) + content)
    while left:
        while not ready(pipe, _LOOK_EVERY_S, select.POLLOUT):
            patience.check()
        left = left[os.write(pipe.fileno(), left) :]


def receive(pipe: IO[bytes], patience: Patience) -> bytes:
    """The content of one frame, from a process that may hang. Raises `EOFError` when the other end is closed."""
    content, wanted = bytearray(), _LENGTH.size
    while len(content) < wanted:
        while not ready(pipe, _LOOK_EVERY_S):
            patience.check()
        data = os.read(pipe.fileno(), min(wanted - len(content), 1 << 20))
        if not data:
            raise EOFError("the pipe is closed")
        content += data
        if len(content) == _LENGTH.size:
            wanted += _LENGTH.unpack(content)[0]
    return bytes(content[_LENGTH.size :])
