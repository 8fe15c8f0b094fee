"""The rival: each of the demo's moves again, by checkpoint and fork-warmed restart, under the same other load."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from suika.backends.local import LocalBackend
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.demo.result import MoveResult
from suika.demo.show import Show
from suika.runtime.baseline import ColdProcesses, Medium, Restart, measure_restart
from suika.runtime.coordinator import JobRun

START_WAIT_S = 120.0


def add_rivals(
    specs: Mapping[str, JobSpec],
    moves: Sequence[MoveResult],
    backend: LocalBackend,
    folder: Path,
    show: Show,
    medium: Medium,
    until_s: float = math.inf,
) -> tuple[MoveResult, ...]:
    """`moves` with what each costs by checkpoint (in `medium`) and restart, where that beats what is known of it.

    `specs` by job name. No further move is begun once the monotonic clock is past `until_s`: those stay as they are.
    """
    show.phase(f"the same moves by checkpoint ({medium}) and restart")
    measured = []
    for move in moves:
        if time.monotonic() < until_s:
            with _beside(specs, move, backend, folder):
                spec = specs[move.job]
                restart = measure_restart(spec, move.old, move.new, backend, backend.cluster, spec.data, medium, folder)
            show.say(f"   {move.job} {move.old.layout} -> {move.new.layout}: {restart.pause_s:.2f} s")
            move = _better(move, restart)
        measured.append(move)
    return tuple(measured)


def _better(move: MoveResult, restart: Restart) -> MoveResult:
    tried = (*move.checkpoint_restart_tried, restart.medium)
    if move.checkpoint_restart_s is not None and move.checkpoint_restart_s <= restart.pause_s:
        return replace(move, checkpoint_restart_tried=tried)
    return replace(
        move,
        checkpoint_restart_s=restart.pause_s,
        checkpoint_restart_by=restart.medium,
        checkpoint_restart_tried=tried,
    )


def cold_restart(
    specs: Mapping[str, JobSpec], moves: Sequence[MoveResult], backend: LocalBackend, folder: Path, show: Show
) -> float:
    """Seconds of one restart whose processes each start a fresh interpreter, as most systems do: the move to the fewest
    ranks, the kindest to it."""
    show.phase("one restart with cold processes, for reference")
    move = min(moves, key=lambda move: move.new.layout.num_ranks)
    spec, made = specs[move.job], iter(range(10_000))

    def machine() -> LocalBackend:
        return LocalBackend(backend.cluster, folder / f"cold{next(made)}", preload=("suika.train.program",))

    cold = ColdProcesses(machine)
    try:
        return measure_restart(
            spec, move.old, move.new, backend, backend.cluster, spec.data, "memory", folder, restart_on=cold
        ).pause_s
    finally:
        cold.close()


@contextmanager
def _beside(specs: Mapping[str, JobSpec], move: MoveResult, backend: LocalBackend, folder: Path) -> Iterator[None]:
    """The other jobs that trained during the move train again, where they did."""
    runs = []
    try:
        for name, plan in move.beside:
            runs.append(_train_on(specs[name], plan, backend, folder / f"beside-{name}"))
        yield
    finally:
        for run in runs:
            run.close()


def _train_on(spec: JobSpec, plan: Plan, backend: LocalBackend, folder: Path) -> JobRun:
    endless = spec.model_copy(update={"steps": 10**9, "snapshot_every_steps": 0})
    run = JobRun(f"beside-{spec.name}", endless, backend, backend.cluster, folder, spec.data, lambda event: None)
    run.start(plan, 1).result(START_WAIT_S)
    return run
