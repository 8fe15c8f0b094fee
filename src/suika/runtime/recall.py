"""A rank's state out of the holders' memory, whatever layout it was copied in."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from suika.core.plan import Plan
from suika.reshard.state import JobShape
from suika.runtime import dcp_plan, frames
from suika.runtime.holder import bytes_of
from suika.runtime.pieces import Piece, dtypes, plan_regions, shares

_ANSWER_S = 10.0
Place = tuple[str, tuple[int, ...]]  # of a piece in the logical state


class RecallError(RuntimeError):
    """No holder gives what is needed, whole."""


class Source(NamedTuple):
    """Piece `number` of the share of `rank` lies at the holder `host:port`, as its own or as a copy."""

    host: str
    port: int
    token: str
    rank: int
    copied: bool
    number: int
    near: bool


def recall(order: Mapping[str, Any], shape: JobShape, plan: Plan, rank: int, buffers: Mapping[str, Tensor]) -> None:
    """Fill every region of `buffers` for `rank` of `plan` from the set of copies that `order` names.

    `order`: `{generation, step, plan, own: {rank: holder}, copied: {rank: holder}}`, holders that answered a moment ago
    (`{node, host, port, token}`). Raises `RecallError` when a piece is not to be had unchanged from any of them.
    """
    old = Plan.from_dict(order["plan"])
    planner = dcp_plan.RegionLoadPlanner(plan_regions(shape, plan, rank), buffers)
    planner.set_up_planner({}, dcp_plan.metadata(shape, old))
    items = sorted(planner.create_local_plan().items, key=lambda item: _place(item.storage_index))
    with Reader(order, shape, old, plan.devices[rank].node) as reader, torch.no_grad():
        for place, wanted in groupby(items, key=lambda item: _place(item.storage_index)):
            values = reader.piece(place)
            for item in wanted:
                part = values
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                planner.resolve_tensor(item).copy_(part)


def _place(index: MetadataIndex) -> Place:
    assert index.offset is not None
    return index.fqn, tuple(index.offset)


class Reader:
    """Reads whole pieces, checked with the sums that were taken when they were handed over; near holders first."""

    def __init__(self, order: Mapping[str, Any], shape: JobShape, old: Plan, node: str) -> None:
        self._order, self._shape = order, shape
        self._lines: dict[tuple[str, int], socket.socket] = {}
        self._broken: dict[tuple[str, int], str] = {}
        self._open = ExitStack()
        self._pieces: dict[Place, Piece] = {}
        self._sources: dict[Place, list[Source]] = {}
        for rank, share in enumerate(shares(shape, old)):
            for number, piece in enumerate(share.pieces):
                self._pieces[piece.place] = piece
                for copied, holders in ((False, order["own"]), (True, order["copied"])):
                    if (holder := holders.get(str(rank))) and (not copied or number < share.num_alone):
                        near = holder["node"] == node
                        source = Source(holder["host"], holder["port"], holder["token"], rank, copied, number, near)
                        self._sources.setdefault(piece.place, []).append(source)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def piece(self, place: Place) -> Tensor:
        piece = self._pieces[place]
        dtype = getattr(torch, dtypes(self._shape)[piece.region.key.kind])
        values = torch.empty(piece.box.shape, dtype=dtype)
        memory = bytes_of(values)
        problems = []
        for source in sorted(self._sources.get(place, ()), key=lambda source: not source.near):
            try:
                self._read(source, memory)
                return values
            except (OSError, RecallError) as error:
                problems.append(f"{source.host}:{source.port}: {error}")
        raise RecallError(f"{piece.name} from {piece.box.starts}: {'; '.join(problems) or 'no holder has it'}")

    def _read(self, source: Source, memory: memoryview) -> None:
        try:
            line = self._line(source.host, source.port)
            about = {"generation": self._order["generation"], "step": self._order["step"], "token": source.token}
            where = {"rank": source.rank, "copied": source.copied, "pieces": [source.number]}
            frames.send(line, {"do": "read", **about, **where})
            answer, _ = frames.receive(line)
            if "error" in answer or answer["sizes"] != [len(memory)]:
                raise RecallError(str(answer.get("error", "it is of another size")))
            frames.receive_into(line, memory)
        except BaseException as error:
            self._broken[source.host, source.port] = str(error) or type(error).__name__
            raise
        if zlib.crc32(memory) != answer["sums"][0]:
            raise RecallError("it has changed since it was handed over")

    def _line(self, host: str, port: int) -> socket.socket:
        if why := self._broken.get((host, port)):
            raise RecallError(why)
        if (host, port) not in self._lines:
            line = self._open.enter_context(socket.create_connection((host, port), _ANSWER_S))
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines[host, port] = line
        return self._lines[host, port]
