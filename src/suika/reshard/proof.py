"""Hashes of cells, taken when they are at hand anyway, and their form on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from suika.reshard.buffers import Side
from suika.reshard.hashing import RowSums, finished, host_hash, row_sums
from suika.reshard.moveplan import CellGroup
from suika.reshard.report import MoveReport


class CellHashes:
    """Hashes of one side's cells, each taken once: as soon as it is asked for, while its bytes are in the cache.
    `on_host`: all participants' state is in host memory. If it is not, what needs no bytes any more is done for all
    cells together, when the first hash is looked at."""

    def __init__(self, side: Side, groups: Sequence[CellGroup], report: MoveReport) -> None:
        self._side, self._groups, self._report = side, groups, report
        self.on_host = False
        self._rows: dict[int, np.ndarray] = {}  # group -> hash of each cell
        self._taken: set[tuple[int, int]] = set()
        self._unfinished: list[tuple[list[tuple[int, int]], RowSums]] = []

    def take(self, cells: Iterable[tuple[int, int]]) -> None:
        """Hash the (group, number of the cell) that have not been hashed yet."""
        new = [place for place in cells if place not in self._taken]
        if not new:
            return
        wanted = [self._groups[group].cells[i] for group, i in new]
        with self._report.hashing(sum(cell.num_bytes for cell in wanted)):
            views = [self._side.view(cell) for cell in wanted]
            if self.on_host:
                for (group, i), view in zip(new, views, strict=True):
                    self._row(group)[i] = host_hash(view)
            else:
                self._unfinished.append((new, row_sums(views)))
        self._taken.update(new)

    def of_groups(self, groups: Sequence[int]) -> dict[int, np.ndarray]:
        """Group -> the hashes of all its cells, in order."""
        for group in groups:  # one by one: cells that are not contiguous are gathered to be read
            self.take([(group, i) for i in range(len(self._groups[group].cells))])
        self._finish()
        return {group: self._row(group) for group in groups}

    def _finish(self) -> None:
        with self._report.hashing(0):
            values = iter(finished([sums for _, sums in self._unfinished]))
        for places, _ in self._unfinished:
            for group, i in places:
                self._row(group)[i] = next(values)
        self._unfinished.clear()

    def _row(self, group: int) -> np.ndarray:
        if group not in self._rows:
            self._rows[group] = np.zeros(len(self._groups[group].cells), dtype=np.uint64)
        return self._rows[group]


def pack_hashes(hashes: Mapping[int, np.ndarray]) -> bytes:
    """Group -> hashes: number of groups, (group, number of cells) of each, then all hashes."""
    counts = np.array([(group, len(row)) for group, row in hashes.items()], dtype=np.uint64).reshape(-1, 2)
    return b"".join([np.uint64(len(counts)).tobytes(), counts.tobytes(), *(row.tobytes() for row in hashes.values())])


def unpack_hashes(packed: bytes) -> dict[int, np.ndarray]:
    """What `pack_hashes` packed."""
    words = np.frombuffer(packed, dtype=np.uint64)
    num = int(words[0])
    counts = words[1 : 1 + 2 * num].reshape(num, 2).astype(np.int64)
    rows = np.split(words[1 + 2 * num :], np.cumsum(counts[:, 1])[:-1]) if num else []
    return {int(group): row for (group, _), row in zip(counts, rows, strict=True)}
