"""A rank's side of copies in memory: training stops for one copy of its share, into room that was made beforehand."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from suika.reshard.transports import memfd
from suika.runtime import frames
from suika.runtime.dcp_plan import piece_view
from suika.runtime.generation import Generation, RankJob
from suika.runtime.holder import room
from suika.runtime.messages import Message
from suika.runtime.pieces import Share, shares

Say = Callable[..., None]
_HAND_OVER_S = 10.0


class _Prepared(NamedTuple):
    """All that a copy takes."""

    order: Message
    share: Share
    room: torch.Tensor


class Copier:
    """At most one copy is under way. An order asks for it; `wants` is this rank's vote, once there is room for it. What
    was voted for is carried out, also if another order (on another thread) has come meanwhile."""

    def __init__(self, job: RankJob, say: Say) -> None:
        self._job, self._say = job, say
        self._lock = threading.Lock()  # of what is prepared
        self._prepared: _Prepared | None = None
        self._voted_for: _Prepared | None = None
        self._busy: threading.Thread | None = None

    def prepare(self, order: Message, live: Generation | None) -> None:
        """Make room for the share, beside the running steps."""
        if live is None or live.number != order["generation"] or self.is_busy:
            return
        with self._lock:
            self._prepared = None
        self._busy = threading.Thread(target=self._prepare, args=(order, live), name="copier", daemon=True)
        self._busy.start()

    @property
    def is_busy(self) -> bool:
        return self._busy is not None and self._busy.is_alive()

    def wants(self, live: Generation) -> bool:
        found = self._voted_for = self._prepared
        return found is not None and found.order["generation"] == live.number

    def copy(self, live: Generation, step: int) -> None:
        """Copy the state after `step` into the room, and give it to this node's holder in the background."""
        began_s = time.monotonic()
        assert self._voted_for is not None
        order, share, memory = self._voted_for
        with self._lock:
            if self._prepared is self._voted_for:
                self._prepared = None
        self._voted_for = None
        fill(memory, share, live.program.buffers())
        header = {**self._header(order, live, step, share), "stall_s": time.monotonic() - began_s}
        self._busy = threading.Thread(target=self._hand_over, args=(order, header, memory), name="copier", daemon=True)
        self._busy.start()

    def _prepare(self, order: Message, live: Generation) -> None:
        try:
            share = shares(self._job.shape, live.plan)[live.rank]
            prepared = _Prepared(order, share, room(share.num_bytes))
        except Exception as error:
            self._fail(order, error)
        else:
            with self._lock:
                self._prepared = prepared

    def _header(self, order: Message, live: Generation, step: int, share: Share) -> dict[str, Any]:
        """What the holder must know. On each node one share says what the whole is: plan and records."""
        here, holders = self._job.device.node, order["holders"]
        after = order["keepers"].get(here)
        first = next(rank for rank, device in enumerate(live.plan.devices) if device.node == here)
        meta = {"plan": live.plan.to_dict(), "records": live.program.records()} if live.rank == first else {}
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
