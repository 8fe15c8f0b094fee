"""Messages by looking into each other's memory: words go over lines, bytes are copied once, straight from the owner.

Rule: map, copy, acknowledge, release. The sender shows a piece of memory and leaves it alone until the receiver has
said that it is taken; only then is the send done. Receives are served inside any `wait`, so that two participants that
both wait for their sends first still get on.
"""

from __future__ import annotations

import os
import struct
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from suika.reshard.transports.base import Lent, TransportError, Work
from suika.reshard.transports.lines import Lines

_OFFER, _TAKEN, _REFUSED, LENT = range(4)  # kinds of packets
HEAD = struct.Struct("<BqQQQQ")  # kind, tag, number of the message, its bytes, start and length of this piece
_GATHER_TAG = -1


class Shown(NamedTuple):
    """A piece of memory that a peer can find by `ticket` and `fds`; `kept` stays alive until it is taken."""

    ticket: bytes
    fds: Sequence[int]
    kept: object


class Memory(Protocol):
    """A kind of memory that several processes can map."""

    @property
    def piece_bytes(self) -> int:
        """The longest piece shown at once."""
        ...

    def show(self, peer: int, piece: torch.Tensor) -> Shown | None:
        """Make `piece` (1-D bytes) visible to `peer`; None when there is no room until it has taken something."""
        ...

    def taken(self, peer: int, shown: Shown) -> None:
        """`peer` has copied it; its room is free again."""
        ...

    def copy(self, peer: int, ticket: bytes, fds: Sequence[int], target: torch.Tensor) -> None:
        """Fill `target` from what `peer` showed; returns when the peer's memory is no longer read."""
        ...


@dataclass(eq=False)
class _Operation:
    """A posted send or receive. `buffer` is None for a receive of unknown length."""

    transport: Mapped
    peer: int
    buffer: torch.Tensor | None
    done_bytes: int = 0
    shown_bytes: int = 0
    shown: deque[Shown] = field(default_factory=deque)

    @property
    def done(self) -> bool:
        return self.buffer is not None and self.done_bytes == self.buffer.numel()

    def wait(self) -> None:
        self.transport.finish(self)


class Mapped:
    """Participant `rank`; its peers are those of `lines`. `timeout_s` bounds every wait."""

    def __init__(self, rank: int, lines: Lines, memory: Memory, timeout_s: float = 60.0) -> None:
        self.rank, self.size = rank, len(lines.peers) + 1
        self.lines, self.memory, self.timeout_s = lines, memory, timeout_s
        self._number = 0
        self._sends: dict[int, _Operation] = {}  # by message number, until acknowledged
        self._outbox: dict[int, deque[tuple[int, int]]] = defaultdict(deque)  # peer -> (number, tag) still to show
        self._receives: dict[tuple[int, int], deque[_Operation]] = defaultdict(deque)  # (peer, tag) -> posted
        self._offers: dict[tuple[int, int], deque[tuple[bytes, list[int]]]] = defaultdict(deque)  # came too early

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        operation = _Operation(self, peer, buffer)
        if buffer.numel():
            self._number += 1
            self._sends[self._number] = operation
            self._outbox[peer].append((self._number, tag))
            self._show(peer)
        return operation

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self._receive(peer, tag, buffer)

    def all_gather(self, payload: bytes) -> list[bytes]:
        said = torch.frombuffer(bytearray(b"\0" + payload), dtype=torch.uint8)  # never empty
        sends = [self.send(peer, _GATHER_TAG, said) for peer in self.lines.peers]
        receives = {peer: self._receive(peer, _GATHER_TAG, None) for peer in self.lines.peers}
        for work in (*receives.values(), *sends):
            work.wait()
        heard = {peer: work.buffer for peer, work in receives.items()} | {self.rank: said}
        return [row.numpy().tobytes()[1:] for _, row in sorted(heard.items()) if row is not None]

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        """Nothing unless a kind of memory can show whole buffers."""
        return {}

    def close(self) -> None:
        """Let go of the lines; peers that still wait for something raise."""
        self.lines.close()
        for _, fds in (offer for offers in self._offers.values() for offer in offers):
            for fd in fds:
                os.close(fd)
        self._offers.clear()

    def finish(self, operation: _Operation) -> None:
        """Serve whatever comes until `operation` is done. Raises `TransportError`."""
        deadline = time.monotonic() + self.timeout_s
        while not operation.done:
            if operation.peer in self.lines.gone:
                raise TransportError(f"participant {operation.peer} {self.lines.gone[operation.peer]}")
            if time.monotonic() > deadline:
                raise TransportError(f"participant {operation.peer} has not answered for {self.timeout_s:.0f} s")
            self.serve(max(0.0, deadline - time.monotonic()))

    def serve(self, timeout_s: float) -> None:
        """Take in the packets that are there, or wait for one."""
        for peer, packet, fds in self.lines.pump(timeout_s):
            self.hear(peer, packet, fds)

    def hear(self, peer: int, packet: bytes, fds: list[int]) -> None:
        kind, tag, number, _, _, length = HEAD.unpack_from(packet)
        if kind == _OFFER:
            self._offers[peer, tag].append((packet, fds))
            self._match(peer, tag)
        elif kind == _REFUSED:
            self.lines.gone[peer] = packet[HEAD.size :].decode()
        else:
            operation = self._sends[number]
            self.memory.taken(peer, operation.shown.popleft())
            operation.done_bytes += length
            if operation.done:
                del self._sends[number]
            self._show(peer)

    def _receive(self, peer: int, tag: int, buffer: torch.Tensor | None) -> _Operation:
        operation = _Operation(self, peer, buffer)
        if not operation.done:
            self._receives[peer, tag].append(operation)
            self._match(peer, tag)
        return operation

    def _show(self, peer: int) -> None:
        """Offer what waits for room, in the order of posting."""
        outbox = self._outbox[peer]
        while outbox:
            number, tag = outbox[0]
            operation = self._sends[number]
            assert operation.buffer is not None
            total, start = operation.buffer.numel(), operation.shown_bytes
            length = min(self.memory.piece_bytes, total - start)
            shown = self.memory.show(peer, operation.buffer[start : start + length])
            if shown is None:
                return
            operation.shown.append(shown)
            operation.shown_bytes += length
            self.lines.post(peer, HEAD.pack(_OFFER, tag, number, total, start, length) + shown.ticket, shown.fds)
            if operation.shown_bytes == total:
                outbox.popleft()

    def _match(self, peer: int, tag: int) -> None:
        """Copy what is offered into what is expected, in order; each piece is acknowledged once it has been copied."""
        offers, receives = self._offers[peer, tag], self._receives[peer, tag]
        while offers and receives:
            packet, fds = offers.popleft()
            operation = receives[0]
            _, _, number, total, start, length = HEAD.unpack_from(packet)
            if operation.buffer is None:
                operation.buffer = torch.empty(total, dtype=torch.uint8)
            if operation.buffer.numel() != total:
                self._refuse(peer, f"sent {total} bytes, expected {operation.buffer.numel()}")
                return
            self.memory.copy(peer, packet[HEAD.size :], fds, operation.buffer[start : start + length])
            self.lines.post(peer, HEAD.pack(_TAKEN, tag, number, total, start, length))
            operation.done_bytes += length
            if operation.done:
                receives.popleft()

    def _refuse(self, peer: int, why: str) -> None:
        """Sends and receives do not match: nothing that follows between the two can be trusted."""
        self.lines.post(peer, HEAD.pack(_REFUSED, 0, 0, 0, 0, 0) + why.encode())
        self.lines.gone[peer] = why
