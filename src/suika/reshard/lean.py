"""Moves in pieces, for devices that cannot hold the old and the new state side by side.

Once all have agreed that a piece has arrived, its old buffers go; then comes the next. The list of pieces that are done
is the ledger of who owns what: `undo` moves them back, last first. That needs every participant: a death leaves the
state in two halves, and the job goes on from its snapshot.

What must be held at once is the larger of the two states and one piece, not their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from suika.core.cluster import Device
from suika.reshard.buffers import Make
from suika.reshard.execute import WAVES, MoveError, Mover
from suika.reshard.moveplan import MovePlan
from suika.reshard.nearby import Nearby
from suika.reshard.pieces import Piece
from suika.reshard.report import MoveReport
from suika.reshard.transports.base import Transport


class LeanMove:
    """One participant's part of a move in pieces. `old` is emptied on the way: nobody else may hold its buffers."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        device: Device,
        old: dict[str, torch.Tensor],
        transport: Transport,
        make: Make | None = None,
    ) -> None:
        self.old, self.new = old, dict[str, torch.Tensor]()
        self.reports: list[MoveReport] = []
        self._pieces, self._device, self._transport, self._make = pieces, device, transport, make
        self._done = 0  # the ledger: so many pieces belong to their new owners
        self._under_way = False  # a piece may have arrived on some participants and not on others

    @property
    def is_torn(self) -> bool:
        """Whether there is no common way back after an error of this participant alone: some pieces are over there, and
        the others may or may not have the one in question."""
        return self._done > 0 and (self._under_way or self._done < len(self._pieces))

    @property
    def is_alone(self) -> bool:
        """Whether an error of this participant alone has left the others waiting inside the first piece. Nobody has let
        go of anything: it is enough to wake them up."""
        return self._done == 0 and self._under_way

    def run(self, problem: str = "") -> dict[str, torch.Tensor]:
        """The new buffers. When a piece is refused, by anybody, all is as it was and `MoveError` rises on everybody; a
        `TransportError` means that a participant or link is gone, and with it the way back.

        `problem`: why this participant cannot take part; then `MoveError` rises on all alike before anything moves.
        """
        try:
            for piece in self._pieces:
                self._carry(piece.there, self.old, self.new, problem)
                self._done += 1
        except MoveError:
            self.undo()
            raise
        return self.new

    def undo(self) -> dict[str, torch.Tensor]:
        """Move back what has been moved; the old buffers, in new memory. All participants call it together."""
        while self._done:
            self._carry(self._pieces[self._done - 1].back, self.new, self.old)
            self._done -= 1
        return self.old

    def _carry(
        self, plan: MovePlan, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], problem: str = ""
    ) -> None:
        """One piece arrives, is verified by all, and leaves where it was. `MoveError`, which rises on all alike, leaves
        it where it was."""
        self._under_way = True
        try:
            self._carry_whole(plan, source, target, problem)
        except MoveError:
            self._under_way = False
            raise
        self._under_way = False

    def _carry_whole(
        self, plan: MovePlan, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], problem: str
    ) -> None:
        me = plan.index(self._device)
        leaving = {name: source[name] for name in plan.old.specs(me)}
        near = None
        try:
            near = Nearby.prepare(plan, me, leaving, self._transport, self._make)
        except MemoryError as error:
            problem = problem or f"MemoryError: {error}"
        mover = Mover(plan, self._device, leaving, self._transport, near=near, problem=problem)
        mover.agree()
        for wave in WAVES:
            mover.carry(wave)
        mover.settle()
        self.reports.append(mover.report)
        target |= mover.new.buffers
        for name in leaving:
            del source[name]
