"""`Books`: a board's jobs in numbers, ready for vectorised planning. J jobs, K hull points.

Like a board, books are a pure function of the snapshot, derived from the previous ones where job views are the same.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from suika.core.snapshot import JobView
from suika.schedule.board import Board
from suika.schedule.menu import Menu, menu_of

NONE = 2**30  # devices of a hull point that does not exist
NEVER = 1e18  # seconds per step of a hull point that does not exist
WAITS, KEPT = -2, -1  # instead of a row of `size_devices`

TIER_WEIGHT = 1e4  # of a tier against the next one, in the value of a plan
TIERS = 60  # that can be told apart in it: those below count as one
LIGHTEST, HEAVIEST = 1e-6, 1e6  # job weights beyond count as these
FIRST = 1e15  # in the order of jobs, of who goes before all others of its tier
MOST_ROWS = 100_000  # of a table of hulls; then another is begun

# Columns of the per-job table.
(
    REMAINING,
    AS_OF_S,
    RATE,
    MOVING_UNTIL_S,
    PAUSE_S,
    PRIORITY,
    WEIGHT,
    MENU,
    TOTAL,
    SUBMITTED_S,
    STARTED_S,
    CHANGED_S,
    MOVES,
    STOPPABLE,
    COLUMNS,
) = range(15)


class _Points:
    """Rows of (devices, seconds per step), in two padded matrices [H, K]."""

    def __init__(self, width: int) -> None:
        self.devices = np.full((64, width), NONE, dtype=np.int64)
        self.step_s = np.full((64, width), NEVER)

    def put(self, row: int, devices: np.ndarray, rates: np.ndarray) -> None:
        rows, width = self.devices.shape
        num = len(devices)
        if row >= rows or num > width:
            grow = (0, rows if row >= rows else 0), (0, max(num - width, 0))
            self.devices = np.pad(self.devices, grow, constant_values=NONE)
            self.step_s = np.pad(self.step_s, grow, constant_values=NEVER)
        self.devices[row, :num] = devices
        self.step_s[row, :num] = 1.0 / rates

    def columns(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Devices and seconds per step of some rows [K, rows]: points lead, so that the long axis of every wide array
        is the contiguous one."""
        width = int((self.devices[rows] < NONE).sum(axis=1).max(initial=0))
        devices, step_s = self.devices[rows, :width].T, self.step_s[rows, :width].T
        return np.ascontiguousarray(devices), np.ascontiguousarray(step_s)


class HullTable:
    """Hulls of all menus seen, and the sizes between their points."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.hull, self.between = _Points(8), _Points(2)
        self.scalars = np.ones((64, 3))  # reference rate, max rate, least device-seconds per step
        self._row_of: dict[int, tuple[Menu, int]] = {}

    def row(self, menu: Menu) -> int:
        found = self._row_of.get(id(menu))
        if found is not None:
            return found[1]
        row = self.num_rows
        if row == len(self.scalars):
            self.scalars = np.vstack([self.scalars, np.ones_like(self.scalars)])
        self.hull.put(row, *menu.hull)
        self.between.put(row, *menu.between)
        self.scalars[row] = menu.reference_rate, menu.max_rate, menu.least_work
        self._row_of[id(menu)] = (menu, row)
        self.num_rows += 1
        return row


_table = HullTable()  # shared by boards: rows are never changed, only added


def _open_table() -> HullTable:
    """The table in use; a full one is left to the boards that still refer to it."""
    global _table
    if _table.num_rows >= MOST_ROWS:
        _table = HullTable()
    return _table


class Books:
    """Numbers of the jobs that planning is about: those with some feasible option. `number` maps back to the board.

    `patience`: a job slowed down by more than this (time since submission over its time alone) gains weight in
    proportion, so that nobody waits for ever. `slowdown` [J] is that measure, `alone_s` [J] the time alone.
    """

    def __init__(self, board: Board, patience: float = np.inf) -> None:
        self.board = board
        hulls, table = _rows(board)
        usable = table[:, MENU] >= 0
        self.number = np.flatnonzero(usable)  # [J] job number on the board
        rows = table[self.number]
        now_s = board.snapshot.now_s
        self.rate = rows[:, RATE]  # steps/s where it runs, 0 while it waits
        self.places = np.arange(len(self.number))
        read_s = np.where(np.isnan(rows[:, AS_OF_S]), now_s, rows[:, AS_OF_S])
        began_s = np.maximum(read_s, rows[:, MOVING_UNTIL_S])
        self.remaining = np.maximum(rows[:, REMAINING] - np.maximum(now_s - began_s, 0.0) * self.rate, 1e-9)
        self.pausing_s = np.maximum(rows[:, MOVING_UNTIL_S] - now_s, 0.0)  # left of a move in flight
        self.pause_s = rows[:, PAUSE_S]  # of a typical change (or start)
        self.num_moves, self.started_s, self.changed_s = rows[:, MOVES], rows[:, STARTED_S], rows[:, CHANGED_S]
        hull = rows[:, MENU].astype(np.int64)
        self.reference_rate, self.max_rate, self.least_work = hulls.scalars[hull].T  # [J] each
        self.stoppable = rows[:, STOPPABLE] > 0
        self.locked = board.locked[self.number]
        self.alone_s = np.maximum(rows[:, TOTAL] / self.max_rate + self.pause_s, 1e-9)
        self.slowdown = (now_s - rows[:, SUBMITTED_S]) / self.alone_s
        self.weight = np.clip(rows[:, WEIGHT], LIGHTEST, HEAVIEST) * np.maximum(self.slowdown / patience, 1.0)
        # Tiers as whole numbers from 0 (highest priority): far apart in the sort key.
        self.tier = np.unique(-rows[:, PRIORITY], return_inverse=True)[1].astype(float)
        # A second of a job counts as much as hours of all jobs of the next tier.
        below = np.minimum(self.tier.max(initial=0.0), TIERS) - self.tier
        self.value_weight = self.weight * TIER_WEIGHT ** np.maximum(below, 0.0)
        self.weighted, self.tiered = bool((self.weight != 1.0).any()), bool(self.tier.any())
        self.held = board.num_held[self.number]
        self.hull_devices, self.hull_step_s = hulls.hull.columns(hull)  # [K, J]
        between = hulls.between.columns(hull)
        # All sizes: hull points, then those between them [K + E, J].
        self.size_devices = np.concatenate([self.hull_devices, between[0]])
        self.size_step_s = np.concatenate([self.hull_step_s, between[1]])

    def put_first(self, job: int) -> None:
        """It goes before all others of its tier; in the value of plans it counts as before."""
        self.weight = self.weight.copy()
        self.weight[job], self.weighted = FIRST, True

    def __len__(self) -> int:
        return len(self.number)

    @cached_property
    def step_s(self) -> np.ndarray:
        """[J] seconds per step where it runs, inf while it waits."""
        return np.divide(1.0, self.rate, out=np.full(len(self), np.inf), where=self.rate > 0)

    @cached_property
    def time_s(self) -> np.ndarray:
        """[J] by which jobs choose: what is left at the reference size, with the start of those that do not run."""
        time_s: np.ndarray = self.remaining / self.reference_rate + np.where(self.held > 0, 0.0, self.pause_s)
        return time_s

    @cached_property
    def smallest(self) -> np.ndarray:
        """[J] the smallest gang."""
        return self.hull_devices[0]


def _rows(board: Board) -> tuple[HullTable, np.ndarray]:
    """The table of hulls, and that of jobs [all jobs of the board, columns], from the previous one where views are
    unchanged."""
    if board.book_rows is not None:
        return board.book_rows
    hulls = _open_table()
    table = np.empty((len(board.jobs), COLUMNS))
    known = np.zeros(len(board.jobs), dtype=bool)
    if board.base_rows is not None and board.base_rows[0] is hulls:
        known = board.previous_number >= 0
        table[known] = board.base_rows[1][board.previous_number[known]]
    for number in np.flatnonzero(~known).tolist():
        table[number] = _row(board, board.jobs[number], hulls)
    board.book_rows = hulls, table
    return board.book_rows


def _row(board: Board, job: JobView, hulls: HullTable) -> tuple[float, ...]:
    step_s = job.step_s
    menu = menu_of(board.fabric, job)
    return (
        job.remaining_steps,
        np.nan if job.as_of_s is None else job.as_of_s,  # NaN: the snapshot's time, whichever snapshot shows it
        0.0 if step_s is None else 1.0 / step_s,
        -np.inf if job.moving_until_s is None else job.moving_until_s,
        board.snapshot.move_cost.typical(job),
        job.priority,
        job.weight,
        hulls.row(menu) if menu else -1,
        job.remaining_steps + job.done_steps,
        job.submitted_s,
        np.nan if job.started_s is None else job.started_s,
        -np.inf if job.last_change_s is None else job.last_change_s,
        job.num_moves,
        job.stoppable,
    )
