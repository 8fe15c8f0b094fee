"""A rank's side of copies in memory: training stops for one copy of its share, into room that was made beforehand."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from suika.reshard.transports import memfd
from suika.runtime import frames
from suika.runtime.dcp_plan import piece_view
from suika.runtime.generation import Generation, RankJob
from suika.runtime.holder import room
from suika.runtime.messages import Message
from suika.runtime.pieces import Share, next_nodes, shares

Say = Callable[..., None]
_HAND_OVER_S = 10.0


class Copier:
    """At most one copy is under way. An order asks for it; `wants` is this rank's vote, once there is room for it."""

    def __init__(self, job: RankJob, say: Say) -> None:
        self._job, self._say = job, say
        self._order: Message | None = None
        self._room: torch.Tensor | None = None
        self._share: Share | None = None
        self._busy: threading.Thread | None = None

    def prepare(self, order: Message, live: Generation | None) -> None:
        """Make room for the share, beside the running steps."""
        if live is None or live.number != order["generation"] or self.is_busy:
            return
        self._order = self._room = None
        self._busy = threading.Thread(target=self._prepare, args=(order, live), name="copier", daemon=True)
        self._busy.start()

    @property
    def is_busy(self) -> bool:
        return self._busy is not None and self._busy.is_alive()

    def wants(self, live: Generation) -> bool:
        return self._order is not None and self._order["generation"] == live.number

    def copy(self, live: Generation, step: int) -> None:
        """Copy the state after `step` into the room, and give it to this node's holder in the background."""
        began_s = time.monotonic()
        order, memory, share = self._order, self._room, self._share
        assert order is not None
        assert memory is not None
        assert share is not None
        self._order = self._room = None
        fill(memory, share, live.program.buffers())
        header = {**self._header(order, live, step, share), "stall_s": time.monotonic() - began_s}
        self._busy = threading.Thread(target=self._hand_over, args=(order, header, memory), name="copier", daemon=True)
        self._busy.start()

    def _prepare(self, order: Message, live: Generation) -> None:
        try:
            self._share = shares(self._job.shape, live.plan)[live.rank]
            self._room = room(self._share.num_bytes)
        except Exception as error:
            self._fail(order, error)
        else:
            self._order = order

    def _header(self, order: Message, live: Generation, step: int, share: Share) -> dict[str, Any]:
        """What the holder must know. The first rank's share says what the whole is: plan and records."""
        here, holders = self._job.device.node, order["holders"]
        after = next_nodes(live.plan).get(here)
        meta = {"plan": live.plan.to_dict(), "records": live.program.records()} if live.rank == 0 else {}
        return {
            "generation": live.number,
            "step": step,
            "rank": live.rank,
            "token": holders[here]["token"],
            "num_bytes": share.num_bytes,
            "alone": share.num_alone if after is not None else 0,
            "alone_bytes": share.alone_bytes,
            "offsets": share.offsets[:-1],
            "sizes": share.num_bytes_of,
            "next": holders[after] if after is not None else None,
            "meta": meta,
        }

    def _hand_over(self, order: Message, header: Mapping[str, Any], memory: torch.Tensor) -> None:
        try:
            give(order["holders"][self._job.device.node]["line"], header, memory)
        except Exception as error:  # the holder is gone or hangs: training goes on without this copy
            self._fail(order, error)

    def _fail(self, order: Message, error: Exception) -> None:
        said = f"{self._job.device}: {type(error).__name__}: {error}"
        self._say("unheld", generation=order["generation"], error=said)


def fill(memory: torch.Tensor, share: Share, buffers: Mapping[str, torch.Tensor]) -> None:
    """Copy each piece of `share` to its place in `memory`."""
    with torch.no_grad():
        for piece, offset, num_bytes in zip(share.pieces, share.offsets[:-1], share.num_bytes_of, strict=True):
            source = piece_view(piece, buffers)
            memory[offset : offset + num_bytes].view(source.dtype).view(source.shape).copy_(source)


def give(name: str, header: Mapping[str, Any], memory: torch.Tensor) -> None:
    """Hand `memory` over to the holder that listens at the abstract Unix socket `name`."""
    span = memfd.span_of(memory)
    assert span is not None
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(_HAND_OVER_S)
        line.connect("\0" + name)
        frames.send(line, header, [span.fd])
        frames.receive(line)
