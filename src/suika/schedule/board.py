"""`Board`: a snapshot as integers and arrays. D devices, N nodes, J jobs (numbered as in `snapshot.jobs`).

A board is a pure function of its snapshot. To be fast it is derived from the previous snapshot's board where job views
are the same objects; the outcome is the same as from scratch (tested). Boards are never changed once built.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from suika.core.snapshot import JobView, Snapshot
from suika.plan.ordering import Fabric, fabric

BookRows = tuple[Any, np.ndarray] | None  # kept for `books`, which alone knows what they are
FREE, OUT, PROMISED = -1, -2, -3  # in `holder`: nobody's, not to be handed out, being released


class Board:
    """Who holds what, as arrays."""

    def __init__(self, snapshot: Snapshot, base: Board | None = None) -> None:
        self.snapshot = snapshot
        self.jobs: tuple[JobView, ...] = snapshot.jobs
        self.fabric: Fabric = fabric(snapshot.cluster)
        self.previous_number = self._numbers_in(base)  # [J] number in `base` of the same view, -1 if new or changed
        self.positions = self._positions(base)
        self.holder = self._holder(base)  # [D] job number, FREE, OUT or PROMISED
        # Numbers that `books` keeps per job; a base's are of use while moves are predicted by the same object.
        same_costs = base is not None and base.snapshot.move_cost is snapshot.move_cost
        self.base_rows: BookRows = base.book_rows if base is not None and same_costs else None
        self.book_rows: BookRows = None

    def _numbers_in(self, base: Board | None) -> np.ndarray:
        if base is None:
            return np.full(len(self.jobs), -1, dtype=np.int32)
        number = {id(job): i for i, job in enumerate(base.jobs)}
        get = number.get
        return np.fromiter((get(id(job), -1) for job in self.jobs), dtype=np.int32, count=len(self.jobs))

    def _positions(self, base: Board | None) -> list[np.ndarray]:
        """Device numbers of each job, in rank order."""
        at = self.fabric.position
        found: list[np.ndarray] = []
        for job, old in zip(self.jobs, self.previous_number.tolist(), strict=True):
            if old >= 0:
                assert base is not None
                found.append(base.positions[old])
            else:
                found.append(np.array([at[d] for d in job.devices], dtype=np.int32))
        return found

    def _holder(self, base: Board | None) -> np.ndarray:
        if base is None:
            holder = np.full(self.fabric.num_devices, FREE, dtype=np.int32)
            stale: Sequence[int] = range(len(self.jobs))
        else:
            # Old job numbers become new ones; who is gone or changed lets go, then takes again below.
            renumber = np.full(len(base.jobs) + 3, FREE, dtype=np.int32)
            kept = self.previous_number >= 0
            renumber[self.previous_number[kept]] = np.flatnonzero(kept)
            holder = renumber[base.holder]  # FREE, OUT, PROMISED index the three last entries, all FREE
            stale = np.flatnonzero(~kept).tolist()
        at, cluster = self.fabric.position, self.snapshot.cluster
        for node in self.snapshot.draining:
            holder[(holder == FREE) & (self.fabric.node_of == self.fabric.node_number[node])] = OUT
        for device in (*self.snapshot.down, *self.snapshot.slow):
            if device in at and holder[at[device]] == FREE:
                holder[at[device]] = OUT
        for device in self.snapshot.promised:
            if holder[at[device]] == FREE:
                holder[at[device]] = PROMISED
        for number in stale:
            mine = self.positions[number]
            taken = holder[mine] >= 0
            assert not taken.any(), f"{cluster.name}: two jobs hold {self.fabric.devices[mine[taken][0]]}"
            holder[mine] = number
        return holder

    # -- devices -------------------------------------------------------------------------------------------------

    @cached_property
    def must_leave(self) -> np.ndarray:
        """[D] mask: nothing may stay or start here (down devices, draining nodes)."""
        mask = np.zeros(self.fabric.num_devices, dtype=bool)
        for node in self.snapshot.draining:
            mask |= self.fabric.node_of == self.fabric.node_number[node]
        for device in self.snapshot.down:
            if device in self.fabric.position:
                mask[self.fabric.position[device]] = True
        return mask

    @cached_property
    def slow(self) -> np.ndarray:
        """[D] mask: who stands here may stay, nobody else is put here."""
        mask = np.zeros(self.fabric.num_devices, dtype=bool)
        mask[[self.fabric.position[device] for device in self.snapshot.slow]] = True
        return mask

    @cached_property
    def free_per_node(self) -> np.ndarray:
        """[N] devices that can be handed out at once."""
        return np.bincount(self.fabric.node_of[self.holder == FREE], minlength=self.fabric.num_nodes).astype(np.int64)

    @cached_property
    def num_usable(self) -> int:
        """Devices that exist for planning: neither down, draining nor slow and unused (promised ones count)."""
        unused = self.slow & (self.holder == OUT)
        return self.fabric.num_devices - int((self.must_leave | unused).sum())

    def nodes_of(self, positions: np.ndarray) -> np.ndarray:
        """[N] how many of `positions` each node holds."""
        return np.bincount(self.fabric.node_of[positions], minlength=self.fabric.num_nodes)

    # -- jobs ----------------------------------------------------------------------------------------------------

    @cached_property
    def num_held(self) -> np.ndarray:
        """[J] devices each job holds."""
        return np.fromiter((len(p) for p in self.positions), dtype=np.int64, count=len(self.jobs))

    @cached_property
    def running(self) -> np.ndarray:
        return self.num_held > 0

    @cached_property
    def locked(self) -> np.ndarray:
        """[J] mask: a move is in flight, the job must be left alone."""
        now_s = self.snapshot.now_s
        return np.fromiter((job.locked_at(now_s) for job in self.jobs), dtype=bool, count=len(self.jobs))

    @cached_property
    def firm(self) -> np.ndarray:
        """[J] mask: runs, and may not be made to give up all its devices."""
        stoppable = np.fromiter((job.stoppable for job in self.jobs), dtype=bool, count=len(self.jobs))
        return self.running & ~stoppable

    @cached_property
    def evicted(self) -> np.ndarray:
        """[J] mask: holds a device that it must leave (lost, or on a draining node)."""
        mask = np.zeros(len(self.jobs), dtype=bool)
        if self.snapshot.draining or self.snapshot.down:
            for number in np.flatnonzero(self.running):
                mask[number] = bool(self.must_leave[self.positions[number]].any())
        return mask


_last: OrderedDict[int, Board] = OrderedDict()  # per cluster, by identity


def board_of(snapshot: Snapshot) -> Board:
    """The board of `snapshot`, derived from the last board of the same cluster."""
    key = id(snapshot.cluster)
    base = _last.get(key)
    if base is not None and base.snapshot is snapshot:
        return base
    if base is not None and base.snapshot.cluster is not snapshot.cluster:
        base = None
    board = _last[key] = Board(snapshot, base)
    while len(_last) > 16:
        _last.popitem(last=False)
    return board
