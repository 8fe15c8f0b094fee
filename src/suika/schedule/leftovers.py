"""What is left after EXPAND's wishes are met goes to whoever saves the most time with it.

First up the hulls, step by step; then, where the next hull point is out of reach, to sizes between the points. B
variants, J jobs, K hull points, E sizes between them. `column` [B, J] says what each job has: a row of `size_devices`,
KEPT or WAITS; it is rewritten, and `free` [B] goes down.
"""

from __future__ import annotations

import numpy as np

from suika.schedule.books import KEPT, WAITS, Books


def climb(
    books: Books,
    remaining: np.ndarray,
    held: np.ndarray,
    step_s: np.ndarray,
    column: np.ndarray,
    free: np.ndarray,
    barred: np.ndarray | None,
) -> None:
    """Spend `free` on steps up the hull, most time saved per device first. `held`, `step_s` [B, J]: before. `barred`
    [K, J]: points that may not be taken."""
    for row in np.flatnonzero(free).tolist():
        jobs, upper, gain, more = _steps_up(books, remaining[row], held[row], step_s[row], column[row])
        left = int(free[row])
        if barred is not None:
            gain[barred[upper, jobs]] = 0.0
        while len(jobs):
            gain[more > left] = 0.0
            best = int(gain.argmax())
            if gain[best] <= 0:
                break
            job, taken = int(jobs[best]), int(upper[best])
            left -= int(more[best])
            column[row, job], upper[best] = taken, taken + 1
            gain[best], more[best] = _step_up(books, float(remaining[row, job]), job, taken)
            if barred is not None and gain[best] > 0 and barred[taken + 1, job]:
                gain[best] = 0.0
        free[row] = left


def fill(
    books: Books, remaining: np.ndarray, held: np.ndarray, step_s: np.ndarray, column: np.ndarray, free: np.ndarray
) -> None:
    """Spend `free` on sizes between hull points, most time saved per device first, one size per job."""
    first = len(books.hull_devices)
    if first == len(books.size_devices):
        return
    for row in np.flatnonzero(free).tolist():
        jobs, kept, has, takes_s = _as_it_is(books, held[row], step_s[row], column[row])
        more = books.size_devices[first:, jobs] - has  # [E, jobs]
        saved_s = remaining[row, jobs] * (takes_s - books.size_step_s[first:, jobs])
        saved_s[(more <= 0) | (saved_s <= _least_saved_s(books, jobs, kept))] = 0.0
        gain = saved_s / np.maximum(more, 1)
        left = int(free[row])
        while gain.size:
            gain[more > left] = 0.0
            size, best = np.unravel_index(gain.argmax(), gain.shape)
            if gain[size, best] <= 0:
                break
            left -= int(more[size, best])
            column[row, jobs[best]] = first + size
            gain[:, best] = 0.0
        free[row] = left


def _as_it_is(
    books: Books, held: np.ndarray, step_s: np.ndarray, column: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of one variant: the jobs that have something; who of them keeps what it had; their devices; seconds per step."""
    jobs = np.flatnonzero(column > WAITS)
    at = column[jobs]
    kept = at == KEPT
    devices = np.where(kept, held[jobs], books.hull_devices[at, jobs])
    return jobs, kept, devices, np.where(kept, step_s[jobs], books.hull_step_s[at, jobs])


def _least_saved_s(books: Books, jobs: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """A change of a job that would run on undisturbed must repay its pause twice."""
    least: np.ndarray = np.where(kept, 2 * books.pause_s[jobs], 0.0)
    return least


def _steps_up(
    books: Books, remaining: np.ndarray, held: np.ndarray, step_s: np.ndarray, column: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of one variant: the jobs that have something and a next hull point; that point; seconds saved per device by going
    there (0: not worth it); and its devices."""
    jobs, kept, has, takes_s = _as_it_is(books, held, step_s, column)
    upper = np.where(kept, (books.hull_devices[:, jobs] <= has).sum(axis=0), column[jobs] + 1)
    exists = upper < len(books.hull_devices)
    jobs, kept, has, takes_s, upper = (array[exists] for array in (jobs, kept, has, takes_s, upper))
    more = books.hull_devices[upper, jobs] - has
    saved_s = remaining[jobs] * (takes_s - books.hull_step_s[upper, jobs])
    saved_s[saved_s <= _least_saved_s(books, jobs, kept)] = 0.0
    return jobs, upper, saved_s / more, more


def _step_up(books: Books, remaining: float, job: int, at: int) -> tuple[float, int]:
    """Seconds saved per device by the hull point after `at`, and its devices; (0, 0) without one."""
    if at + 1 >= len(books.hull_devices):
        return 0.0, 0
    more = int(books.hull_devices[at + 1, job] - books.hull_devices[at, job])
    return remaining * float(books.hull_step_s[at, job] - books.hull_step_s[at + 1, job]) / more, more
