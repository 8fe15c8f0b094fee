"""Flows become messages in one global order that cannot deadlock.

All flows of a pair of participants form one byte stream, cut into chunks. Chunks are edge-coloured: in a round a
participant sends at most one chunk and receives at most one. Everybody works through its own messages in round order
and waits in that order, so the globally first unfinished message always has both its ends posted. Weights (wave 0) come
before all else (wave 1); in a wave, what is forwarded (hop 1) comes after everything that arrives (hop 0).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from itertools import product
from typing import NamedTuple

from suika.reshard.routes import ALIGN_BYTES, Flow

WINDOW = 4  # packed messages in flight per participant: more only needs more memory (docs/numbers/reshard.md)
MOST_IN_FLIGHT = 32  # messages, those included that are sent from where they lie


class Segment(NamedTuple):
    """Bytes [start, stop) of a group's stream, at `offset` of a pair's stream."""

    offset: int
    group: int
    start: int
    stop: int


class Stream(NamedTuple):
    """Everything that `src` sends to `dst` in one hop of a wave."""

    hop: int
    src: int
    dst: int
    segments: tuple[Segment, ...]
    num_bytes: int  # with the gaps that keep segments aligned
    wave: int = 0


class Message(NamedTuple):
    """Bytes [start, stop) of stream number `stream`, sent in round `round`."""

    round: int
    stream: int
    start: int
    stop: int


def streams_of(flows: Iterable[Flow], late: Container[int] = ()) -> list[Stream]:
    """One stream per (wave, hop, src, dst), in that order; groups in `late` go in the second wave."""
    pairs: dict[tuple[int, int, int, int], list[Flow]] = defaultdict(list)
    for flow in flows:
        pairs[int(flow.group in late), flow.hop, flow.src, flow.dst].append(flow)
    streams = []
    for (wave, hop, src, dst), parts in sorted(pairs.items()):
        segments, at = [], 0
        for flow in sorted(parts):
            segments.append(Segment(at, flow.group, flow.start, flow.stop))
            at += flow.stop - flow.start
            at += -at % ALIGN_BYTES
        streams.append(Stream(hop, src, dst, tuple(segments), at, wave))
    return streams


def messages_of(streams: list[Stream], chunk_bytes: int) -> list[Message]:
    """Chunks of all streams, edge-coloured: first-fit, longest streams first, sorted by (round, stream)."""
    assert chunk_bytes % ALIGN_BYTES == 0, chunk_bytes
    messages: list[Message] = []
    base = 0
    for leg in product((0, 1), (0, 1)):
        sending: dict[int, int] = defaultdict(int)  # bit r: busy in round r
        receiving: dict[int, int] = defaultdict(int)
        here = [i for i, stream in enumerate(streams) if (stream.wave, stream.hop) == leg]
        last = -1
        for i in sorted(here, key=lambda i: (-streams[i].num_bytes, i)):
            _, src, dst, _, num_bytes, _ = streams[i]
            busy = sending[src] | receiving[dst]
            for start in range(0, num_bytes, chunk_bytes):
                free = ~busy & (busy + 1)  # lowest round in which both are idle
                busy |= free
                sending[src] |= free
                receiving[dst] |= free
                colour = free.bit_length() - 1
                last = max(last, colour)
                messages.append(Message(base + colour, i, start, min(start + chunk_bytes, num_bytes)))
        base += last + 1
    return sorted(messages)


def check_order(streams: list[Stream], messages: list[Message]) -> None:
    """Raise `AssertionError` unless the messages carry every stream once and no round uses a participant twice."""
    carried: dict[int, int] = defaultdict(int)
    sending: set[tuple[int, int]] = set()
    receiving: set[tuple[int, int]] = set()
    for message in messages:
        stream = streams[message.stream]
        assert message.start == carried[message.stream], f"{message} out of order"
        carried[message.stream] = message.stop
        assert (message.round, stream.src) not in sending, f"{message}: {stream.src} sends twice in a round"
        assert (message.round, stream.dst) not in receiving, f"{message}: {stream.dst} receives twice in a round"
        sending.add((message.round, stream.src))
        receiving.add((message.round, stream.dst))
    for i, stream in enumerate(streams):
        assert carried[i] == stream.num_bytes, f"stream {i} is not sent completely"
