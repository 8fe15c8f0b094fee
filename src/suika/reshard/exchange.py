"""The messages of a move, from and to one participant.

Everybody posts its own messages in round order and finishes them in that order. Long pieces go from and into the live
buffers themselves; only what is cut across is packed, and packed messages are few at a time. In between, neighbours'
memory is read. Cells are hashed when they leave and when they are complete, while the wire works.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

from suika.reshard.buffers import Parcel, Part, Side, parcels, parts
from suika.reshard.moveplan import MovePlan
from suika.reshard.nearby import Nearby
from suika.reshard.proof import CellHashes
from suika.reshard.report import MoveReport
from suika.reshard.rounds import MOST_IN_FLIGHT, WINDOW, Message, Stream
from suika.reshard.transports.base import Transport, Work

_PARCELS_PER_CHUNK = 16  # a part longer than this share of a chunk goes by itself


class Letter(NamedTuple):
    """One message at this end. `parcels` is empty where a neighbour's memory is read."""

    stream: Stream
    message: Message
    sending: bool
    parts: tuple[Part, ...]
    parcels: tuple[Parcel, ...]

    @property
    def staging_bytes(self) -> int:
        return sum(parcel.num_bytes for parcel in self.parcels if parcel.direct is None)

    @property
    def cells(self) -> list[tuple[int, int]]:
        return [(part.group, part.number) for part in self.parts]


class _Posted(NamedTuple):
    letter: Letter
    works: list[tuple[Work, Parcel, torch.Tensor | None]]  # with what the parcel is packed in


class Exchange:
    """One participant's messages, laid out before the pause. `sources` and `arrived` are hashes of its two sides."""

    def __init__(
        self,
        plan: MovePlan,
        me: int,
        transport: Transport,
        near: Nearby | None,
        sides: tuple[Side, Side],
        hashes: tuple[CellHashes, CellHashes],
        report: MoveReport,
    ) -> None:
        self._me, self._transport, self._near, self._report = me, transport, near, report
        self._old, self._new = sides
        self._sources, self._arrived = hashes
        self._staging = _Staging(next((t.device for t in {**self._old.buffers, **self._new.buffers}.values()), None))
        self._missing: dict[tuple[int, int], int] = {}  # cells to be hashed when complete -> bytes still to come
        self._letters: dict[tuple[int, int], list[Letter]] = defaultdict(list)  # by wave and hop
        for message in plan.messages:
            stream = plan.streams[message.stream]
            if me in (stream.src, stream.dst):
                self._letters[stream.wave, stream.hop].append(self._laid_out(plan, stream, message))
        for group, demand in enumerate(plan.demands):
            proven = near is not None and near.proven(demand.holders, me)
            if me in demand.needers and me not in demand.holders and not proven:
                self._missing |= {(group, i): cell.num_bytes for i, cell in enumerate(plan.groups[group].cells)}
        packed = sorted((m.staging_bytes for legs in self._letters.values() for m in legs), reverse=True)
        self._staging.touch([size for size in packed[:WINDOW] if size])

    def run(self, wave: int, hop: int) -> str:
        """Carry out one leg; what went wrong in reading, or nothing. Raises `TransportError`."""
        in_flight: deque[_Posted] = deque()
        problem = ""
        for letter in self._letters[wave, hop]:
            if not letter.parcels:
                problem = self._read(letter) or problem
                continue
            while len(in_flight) >= MOST_IN_FLIGHT or (letter.staging_bytes and _num_packed(in_flight) >= WINDOW):
                self._finish(in_flight.popleft())
            in_flight.append(self._post(letter))
            staged = sum(posted.letter.staging_bytes for posted in in_flight)
            self._report.staging_bytes = max(self._report.staging_bytes, staged)
        while in_flight:
            self._finish(in_flight.popleft())
        return problem

    def _laid_out(self, plan: MovePlan, stream: Stream, message: Message) -> Letter:
        sending = stream.src == self._me
        found = tuple(parts(stream, message, plan.groups))
        if self._near is not None and self._near.reads(stream):
            return Letter(stream, message, sending, found, ())
        side = self._old if sending and stream.hop == 0 else self._new
        cut = parcels(found, plan.chunk_bytes // _PARCELS_PER_CHUNK)
        return Letter(stream, message, sending, found, tuple(Parcel(run, side) for run in cut))

    def _post(self, letter: Letter) -> _Posted:
        stream, tag = letter.stream, letter.message.round
        if letter.sending and stream.hop == 0:
            self._sources.take(dict.fromkeys(letter.cells))
        works: list[tuple[Work, Parcel, torch.Tensor | None]] = []
        for parcel in letter.parcels:
            wire, packed = parcel.direct, None
            if wire is None:
                packed = self._staging.take(parcel.num_bytes)
                wire = packed[: parcel.num_bytes]
                if letter.sending:
                    parcel.pack(wire)
            if letter.sending:
                self._report.sent_bytes += parcel.num_bytes
                works.append((self._transport.send(stream.dst, tag, wire), parcel, packed))
            else:
                self._report.received_bytes += parcel.num_bytes
                works.append((self._transport.recv(stream.src, tag, wire), parcel, packed))
        return _Posted(letter, works)

    def _finish(self, posted: _Posted) -> None:
        for work, parcel, packed in posted.works:
            work.wait()
            if packed is not None:
                if not posted.letter.sending:
                    parcel.unpack(packed[: parcel.num_bytes])
                self._staging.give(packed)
        if not posted.letter.sending:
            self._note_arrival(posted.letter.parts)

    def _read(self, letter: Letter) -> str:
        """Copy what the owner shows; the owner has nothing to do."""
        if letter.sending:
            return ""
        assert self._near is not None
        copied, adopted, problem = self._near.read(letter.stream.hop, letter.stream.src, letter.parts, self._new)
        self._report.received_bytes += copied + adopted
        self._report.adopted_bytes += adopted
        self._note_arrival(letter.parts)
        return problem

    def _note_arrival(self, arrived: Sequence[Part]) -> None:
        complete = []
        for part in arrived:
            place = part.group, part.number
            if place in self._missing:
                self._missing[place] -= part.high - part.low
                if not self._missing[place]:
                    complete.append(place)
        self._arrived.take(complete)


class _Staging:
    """Memory for packed parcels, used again and again: fresh pages would cost more than the copy into them."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []

    def touch(self, sizes: Sequence[int]) -> None:
        """Have buffers ready, their pages written to."""
        self._free += [torch.empty(size, dtype=torch.uint8, device=self._device).zero_() for size in sizes]

    def take(self, num_bytes: int) -> torch.Tensor:
        """The smallest free buffer that is large enough, or a new one."""
        fitting = [i for i, buffer in enumerate(self._free) if buffer.numel() >= num_bytes]
        if not fitting:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._free.pop(min(fitting, key=lambda i: self._free[i].numel()))

    def give(self, buffer: torch.Tensor) -> None:
        self._free.append(buffer)


def _num_packed(in_flight: deque[_Posted]) -> int:
    return sum(posted.letter.staging_bytes > 0 for posted in in_flight)
