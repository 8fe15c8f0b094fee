"""Participants of one host that look into each other's memory (`memfd.py`): one copy, no wire.

`send` and `recv` take any CPU tensor; what lies in memory of its own is shown where it lies, the rest is staged once.
`lend` shows whole buffers: a needer then copies from an owner's live buffer into its own, in whatever cut, or adopts
the buffer as it is.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from suika.reshard.transports import memfd
from suika.reshard.transports.base import Lent, TransportError
from suika.reshard.transports.lines import FDS_PER_PACKET, PACKET_BYTES, Exchange, Lines
from suika.reshard.transports.mapped import HEAD, LENT, Mapped, Shown

_TICKET = struct.Struct("<QQ")  # offset and bytes in the memfd that comes along
_ENTRY_BYTES = 512  # room for one lent buffer's description in a packet
_PER_PACKET = min(FDS_PER_PACKET, (PACKET_BYTES - HEAD.size) // _ENTRY_BYTES)
_NOTHING = torch.empty(0, dtype=torch.uint8)


class _HostMemory:
    """Pieces of memfds, whole messages at once."""

    piece_bytes = 1 << 62

    def show(self, peer: int, piece: torch.Tensor) -> Shown:
        staged = memfd.placed(piece)
        span = memfd.span_of(staged)
        assert span is not None
        return Shown(_TICKET.pack(span.offset, span.num_bytes), (span.fd,), staged)

    def taken(self, peer: int, shown: Shown) -> None:
        pass  # staging goes with its last reference

    def copy(self, peer: int, ticket: bytes, fds: Sequence[int], target: torch.Tensor) -> None:
        (fd,) = fds
        try:
            target.copy_(memfd.glance(memfd.Span(fd, *_TICKET.unpack(ticket))))
        finally:
            os.close(fd)


class _Entry(NamedTuple):
    """A lent buffer as its owner describes it."""

    name: str
    dtype: str
    shape: list[int]


@dataclass
class _LentBuffers:
    """A neighbour's buffers. Each is mapped when first asked for; descriptors go with the last reference."""

    found: dict[str, tuple[_Entry, int | None]] = field(default_factory=dict)  # name -> (entry, descriptor)
    complete: bool = False
    _views: dict[str, torch.Tensor] = field(default_factory=dict)

    def view(self, name: str) -> torch.Tensor:
        if name not in self._views:
            entry, fd = self.found[name]
            flat = _NOTHING if fd is None else memfd.glance(memfd.Span(fd, 0, _num_bytes(entry)))
            self._views[name] = _shaped(flat, entry)
        return self._views[name]

    def adopt(self, name: str) -> torch.Tensor:
        entry, fd = self.found[name]
        return _shaped(_NOTHING if fd is None else memfd.attach(os.dup(fd), _num_bytes(entry)), entry)

    def __del__(self) -> None:
        for _, fd in self.found.values():
            if fd is not None:
                os.close(fd)


class Shared(Mapped):
    """Participant `rank` among `neighbours` on the same host, with the same user. Raises `ApartError` where these
    cannot reach each other; all of them then do, so that they can agree on another way."""

    def __init__(self, rank: int, neighbours: Sequence[int], exchange: Exchange, timeout_s: float = 60.0) -> None:
        """`exchange` is an all-gather over every participant of the move; all of them must call it twice."""
        super().__init__(rank, Lines.open(rank, neighbours, exchange), _HostMemory(), timeout_s)
        # What each neighbour has lent, call by call: one that is ahead may have begun the next.
        self._lent: dict[int, deque[_LentBuffers]] = {peer: deque([_LentBuffers()]) for peer in self.lines.peers}

    def lend(self, buffers: Mapping[str, torch.Tensor]) -> dict[int, Lent]:
        """See `Transport.lend`. Raises ValueError for a buffer that `memfd` has not made."""
        own = [_described(name, buffer) for name, buffer in buffers.items()]
        for peer in self.lines.peers:
            for first in range(0, max(1, len(own)), _PER_PACKET):
                part = own[first : first + _PER_PACKET]
                head = HEAD.pack(LENT, 0, 0, 0, 0, int(first + _PER_PACKET >= len(own)))
                fds = [fd for _, fd in part if fd is not None]
                self.lines.post(peer, head + json.dumps([entry for entry, _ in part]).encode(), fds)
        deadline = time.monotonic() + self.timeout_s
        while missing := [peer for peer, calls in self._lent.items() if not calls[0].complete]:
            if gone := [peer for peer in missing if peer in self.lines.gone]:
                raise TransportError(f"participant {gone[0]} {self.lines.gone[gone[0]]}")
            if time.monotonic() > deadline:
                raise TransportError(f"participants {missing} have lent nothing for {self.timeout_s:.0f} s")
            self.serve(max(0.0, deadline - time.monotonic()))
        return {peer: calls.popleft() for peer, calls in self._lent.items()}

    def hear(self, peer: int, packet: bytes, fds: list[int]) -> None:
        kind, *_, last = HEAD.unpack_from(packet)
        if kind != LENT:
            super().hear(peer, packet, fds)
            return
        lent, arrived = self._lent[peer][-1], iter(fds)
        for entry in (_Entry(*entry) for entry in json.loads(packet[HEAD.size :])):
            lent.found[entry.name] = (entry, next(arrived) if _num_bytes(entry) else None)
        if last:
            lent.complete = True
            self._lent[peer].append(_LentBuffers())


def _described(name: str, buffer: torch.Tensor) -> tuple[_Entry, int | None]:
    entry = _Entry(name, str(buffer.dtype).removeprefix("torch."), list(buffer.shape))
    if not buffer.numel():
        return entry, None
    span = memfd.span_of(buffer)
    if span is None or span.offset or not buffer.is_contiguous():
        raise ValueError(f"buffer {name} does not lie in memory that can be shown: make it with memfd.placed")
    return entry, span.fd


def _num_bytes(entry: _Entry) -> int:
    return getattr(torch, entry.dtype).itemsize * torch.Size(entry.shape).numel()


def _shaped(flat: torch.Tensor, entry: _Entry) -> torch.Tensor:
    return flat.view(getattr(torch, entry.dtype)).view(entry.shape)
