"""The two ways to carry a rank's state from one generation to the next.

`Kept`: both states side by side until the commit; an abort only forgets the new one. `Lean`: piece by piece, each let
go of by its old owner once it has arrived; an abort carries the pieces back, which takes everybody.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from suika.core.cluster import Device
from suika.core.redeployment import Mode
from suika.reshard.execute import REST, WEIGHTS, MoveError, Mover
from suika.reshard.lean import LeanMove
from suika.reshard.links import Links
from suika.reshard.modes import fitting_mode
from suika.reshard.moveplan import MovePlan
from suika.reshard.nearby import Nearby
from suika.reshard.pieces import pieces_of
from suika.reshard.report import MoveReport
from suika.reshard.transports import memfd
from suika.runtime.program import Program
from suika.runtime.ways import Way

Ready = Callable[[Mapping[str, torch.Tensor]], None]  # binds the new program; masters and moments may still be coming


def choose_mode(plan: MovePlan, links: Links, way: Way, wish: Mode | None) -> Mode:
    """Side by side where it fits, else in pieces; the same on all participants, who call it together. Refused here,
    before anything stops, when not even one piece at a time fits; `wish` "keep" is refused when it is allocated."""
    if wish == "keep" or way.make is not memfd.empty:
        return wish or "keep"
    said = way.transport.all_gather(str(memfd.available_bytes()).encode())
    return fitting_mode(plan, links, [int(word) for word in said], lean=wish == "lean")


class Carriage(Protocol):
    def agree(self, word: Any) -> list[Any]:
        """Everybody's word, once all are able to begin; raises `MoveError` on all alike otherwise."""
        ...

    def carry(self, ready: Ready | None, begin: Callable[[], None] | None) -> MoveReport:
        """Move and prove. `ready` (None for a leaver) is called as soon as the new program can be bound; `begin`, if
        given, runs beside the rest of the transfer."""
        ...

    @property
    def is_torn(self) -> bool:
        """Whether participants may hold parts of both states, with no common way back."""
        ...

    @property
    def is_alone(self) -> bool:
        """Whether others wait for what this participant, after an error of its own, will not bring, and have not
        changed anything: their connections may be broken."""
        ...

    def restore(self) -> None:
        """After an abort, with all participants alive: the old program has its state again."""
        ...

    def join(self) -> None:
        """Wait for threads that a broken connection has ended."""
        ...


class Kept:
    """Made while training goes on: the new buffers are allocated and every message is laid out."""

    def __init__(self, plan: MovePlan, device: Device, live: Program | None, way: Way) -> None:
        old = live.buffers() if live is not None else {}
        near = Nearby.prepare(plan, plan.index(device), old, way.transport, way.make)
        self._mover = Mover(plan, device, old, way.transport, near=near)
        self._streaming: threading.Thread | None = None  # brings masters and moments while the new program computes

    is_torn = False
    is_alone = False  # it makes no difference: nobody is needed for the way back

    def agree(self, word: Any) -> list[Any]:
        return self._mover.agree(word)

    def carry(self, ready: Ready | None, begin: Callable[[], None] | None) -> MoveReport:
        mover = self._mover
        mover.carry(WEIGHTS)
        if ready is not None:
            ready(mover.new.buffers)
        if begin is not None:
            self._compute_while_streaming(begin)
        else:
            mover.carry(REST)
        mover.settle()
        return mover.report

    def restore(self) -> None:
        """Nothing was touched."""

    def join(self) -> None:
        if self._streaming is not None:
            self._streaming.join()

    def _compute_while_streaming(self, begin: Callable[[], None]) -> None:
        """Nothing that moved is changed by it: after an abort the gradients are dropped with the new program."""
        problems: list[Exception] = []

        def stream() -> None:
            try:
                self._mover.carry(REST)
            except Exception as error:
                problems.append(error)

        self._streaming = threading.Thread(target=stream, name="stream", daemon=True)
        self._streaming.start()
        begin()
        self._streaming.join()
        if problems:
            raise problems[0]


class Lean:
    """The old program must have no other hold on its buffers than what `bind` gave it."""

    def __init__(self, plan: MovePlan, links: Links, device: Device, live: Program | None, way: Way) -> None:
        if way.make is not memfd.empty:
            raise MoveError("lean moves are for state in host memory")
        self._device, self._live, self._way = device, live, way
        self._pieces = pieces_of(plan, links)
        self._move: LeanMove | None = None

    @property
    def is_torn(self) -> bool:
        return self._move is not None and self._move.is_torn

    @property
    def is_alone(self) -> bool:
        return self._move is not None and self._move.is_alone

    def agree(self, word: Any) -> list[Any]:
        return [json.loads(said) for said in self._way.transport.all_gather(json.dumps(word).encode())]

    def carry(self, ready: Ready | None, begin: Callable[[], None] | None) -> MoveReport:
        old = dict(self._live.buffers()) if self._live is not None else {}
        self._move = LeanMove(self._pieces, self._device, old, self._way.transport, self._way.make)
        del old
        problem = ""
        try:
            if self._live is not None:
                _let_go(self._live)
        except Exception as error:  # the others must hear of it where they wait for this one: in the first piece
            problem = f"{type(error).__name__}: {error}"
        buffers = self._move.run(problem)
        if ready is not None:
            ready(buffers)
        return MoveReport.total(self._move.reports)

    def restore(self) -> None:
        if self._move is not None:
            old = self._move.undo()
            if self._live is not None:
                self._live.bind(old)

    def join(self) -> None:
        """There are none."""


def _let_go(program: Program) -> None:
    """Have `program` hold addresses instead of its state: memory that is reserved and never touched takes no pages."""
    program.bind({name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in program.buffer_specs().items()})
