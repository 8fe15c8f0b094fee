"""Frames on a stream socket: a JSON header, then as many raw bytes as it says. No torch."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

Header = dict[str, Any]
_LENGTH = struct.Struct("<I")
_MAX_HEADER_BYTES = 64 << 20


class FrameError(ConnectionError):
    """The other end is gone, or does not speak this language."""


def send(line: socket.socket, header: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send a header (descriptors go with it, on a Unix socket). Raises `OSError`."""
    text = json.dumps(header, separators=(",", ":")).encode()
    prefix = _LENGTH.pack(len(text))
    if fds:
        socket.send_fds(line, [prefix], list(fds))
        line.sendall(text)
    else:
        line.sendall(prefix + text)


def send_file(line: socket.socket, fd: int, start: int, stop: int) -> None:
    """Send bytes [start, stop) of a file without reading them into this process. Raises `OSError`."""
    with os.fdopen(os.dup(fd), "rb") as file:  # `sendfile` heeds the socket's time-out and a signal in between
        line.sendfile(file, start, stop - start)


def receive(line: socket.socket, with_fd: bool = False) -> tuple[Header, list[int]]:
    """The next header and the descriptors that came with it, now the caller's. Raises `FrameError`, `TimeoutError`."""
    fds: list[int] = []
    if with_fd:
        prefix, fds, _, _ = socket.recv_fds(line, _LENGTH.size, 1)
        prefix += receive_bytes(line, _LENGTH.size - len(prefix)) if prefix else b""
    else:
        prefix = receive_bytes(line, _LENGTH.size)
    try:
        if len(prefix) < _LENGTH.size:
            raise FrameError("the other end closed the line")
        (length,) = _LENGTH.unpack(prefix)
        if length > _MAX_HEADER_BYTES:
            raise FrameError(f"a header of {length} bytes")
        header = json.loads(receive_bytes(line, length))
        if not isinstance(header, dict):
            raise FrameError("a header that is no object")
        return header, fds
    except BaseException as error:
        for fd in fds:
            os.close(fd)
        if isinstance(error, ValueError):
            raise FrameError(f"not a header: {error}") from None
        raise


def receive_bytes(line: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    receive_into(line, memoryview(data))
    return bytes(data)


def receive_into(line: socket.socket, memory: memoryview) -> None:
    """Fill `memory`. Raises `FrameError` when the other end stops before."""
    done = 0
    while done < len(memory):
        count = line.recv_into(memory[done:])
        if not count:
            raise FrameError("the other end closed the line")
        done += count
