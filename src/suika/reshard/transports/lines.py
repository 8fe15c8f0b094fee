"""Lines between processes of one host: Unix sockets that carry small packets, and descriptors with them.

Addresses are abstract (no file is left behind) and known to the neighbours alone; both ends check that the other
process belongs to the same user. Nothing here blocks: packets that do not fit wait until they do.
"""

from __future__ import annotations

import errno
import os
import secrets
import selectors
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from suika.reshard.transports.base import TransportError

PACKET_BYTES = 64 << 10
FDS_PER_PACKET = 128  # the kernel takes 253
_FULL = (errno.EAGAIN, errno.ENOBUFS, errno.ETOOMANYREFS)

Exchange = Callable[[bytes], list[bytes]]  # an all-gather over every participant of the move


class ApartError(TransportError):
    """Neighbours cannot reach each other on this host: another way is needed."""


class Lines:
    """One connected socket per neighbour. `gone` says why a neighbour cannot be reached any more."""

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self.gone: dict[int, str] = {}
        self._sockets = dict(sockets)
        self._waiting: dict[int, deque[tuple[bytes, Sequence[int]]]] = {peer: deque() for peer in sockets}
        self._selector = selectors.DefaultSelector()
        for peer, line in sockets.items():
            line.setblocking(False)
            self._selector.register(line, selectors.EVENT_READ, peer)

    @staticmethod
    def open(rank: int, neighbours: Sequence[int], exchange: Exchange, timeout_s: float = 5.0) -> Lines:
        """Connect `rank` with `neighbours` (itself not among them). All participants of `exchange` call it together.

        Raises `ApartError` on all neighbours alike when one of them cannot be connected.
        """
        sockets: dict[int, socket.socket] = {}
        problem = ""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            name = b"suika-" + secrets.token_hex(16).encode()
            listener.bind(b"\0" + name)
            listener.listen(len(neighbours) + 1)
            listener.settimeout(timeout_s)
            names = exchange(name)
            try:
                for peer in neighbours:  # whoever comes later in the order listens
                    if peer > rank:
                        sockets[peer] = _connect(names[peer], rank, timeout_s)
                for _ in range(sum(peer < rank for peer in neighbours)):
                    peer, line = _accept(listener, timeout_s)
                    sockets[peer] = line
            except OSError as error:
                problem = str(error) or type(error).__name__
        problems = exchange(problem.encode())
        for peer in (rank, *neighbours):
            if problems[peer]:
                for line in sockets.values():
                    line.close()
                raise ApartError(f"participant {peer} cannot reach its neighbours: {problems[peer].decode()}")
        return Lines(sockets)

    @property
    def peers(self) -> list[int]:
        return sorted(self._sockets)

    def post(self, peer: int, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Send a packet now or as soon as there is room. `fds` must stay open until the peer has answered."""
        self._waiting[peer].append((packet, fds))
        self._flush(peer)

    def pump(self, timeout_s: float) -> Iterator[tuple[int, bytes, list[int]]]:
        """Packets that have arrived: (peer, packet, descriptors, now the caller's). Waits at most `timeout_s`."""
        self._watch_outgoing()
        for key, events in self._selector.select(timeout_s):
            peer = key.data
            if events & selectors.EVENT_WRITE:
                self._flush(peer)
            while events & selectors.EVENT_READ and peer not in self.gone:
                try:
                    packet, fds, _, _ = socket.recv_fds(self._sockets[peer], PACKET_BYTES, FDS_PER_PACKET)
                except BlockingIOError:
                    break
                except OSError as error:
                    self._lose(peer, str(error))
                    break
                if not packet:
                    self._lose(peer, "closed its line")
                    break
                yield peer, packet, fds

    def close(self) -> None:
        for line in self._sockets.values():
            line.close()
        self._selector.close()

    def _watch_outgoing(self) -> None:
        for peer, line in self._sockets.items():
            if peer not in self.gone:
                wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._waiting[peer] else 0)
                self._selector.modify(line, wants, peer)

    def _flush(self, peer: int) -> None:
        waiting = self._waiting[peer]
        while waiting and peer not in self.gone:
            try:
                socket.send_fds(self._sockets[peer], [waiting[0][0]], list(waiting[0][1]))
            except OSError as error:
                if error.errno not in _FULL:
                    self._lose(peer, str(error))
                return
            waiting.popleft()

    def _lose(self, peer: int, why: str) -> None:
        self.gone[peer] = why
        with suppress(KeyError, ValueError):
            self._selector.unregister(self._sockets[peer])


def _connect(name: bytes, rank: int, timeout_s: float) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.settimeout(timeout_s)
        line.connect(b"\0" + name)
        _check_user(line)
        line.send(struct.pack("<I", rank))
    except BaseException:
        line.close()
        raise
    return line


def _accept(listener: socket.socket, timeout_s: float) -> tuple[int, socket.socket]:
    line, _ = listener.accept()
    try:
        line.settimeout(timeout_s)
        _check_user(line)
        return struct.unpack("<I", line.recv(4))[0], line
    except BaseException:
        line.close()
        raise


def _check_user(line: socket.socket) -> None:
    _, user, _ = struct.unpack("3i", line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        raise PermissionError(f"the process at the other end belongs to user {user}")
