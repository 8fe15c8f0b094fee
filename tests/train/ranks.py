"""`run_ranks`: run a function as n ranks, forked from this process (torch is already imported: no start-up time)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_fork = multiprocessing.get_context("fork")


def run_ranks(num_ranks: int, body: Callable[[int, dist.Store], Any], timeout_s: float = 60) -> list[Any]:
    """`body(rank, store)` in `num_ranks` processes; what each returned (pickled), in rank order.

    The store is a file: no process hosts a server, so none can outlive the others' need of it. The first failure of a
    rank is raised here with its traceback, the others are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        pipes, processes = [], []
        cores = sorted(os.sched_getaffinity(0))
        for rank in range(num_ranks):
            here, there = _fork.Pipe(duplex=False)
            core = cores[rank % len(cores)] if num_ranks > 1 else None
            process = _fork.Process(target=_rank, args=(rank, core, path, body, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [p for rank, p in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {[r for r in range(len(pipes)) if r not in results]} did not finish in time")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if not ok:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank(rank: int, core: int | None, path: str, body: Callable[[int, dist.Store], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    if core is not None:  # gloo's thread spins while its trainer holds a lock and waits for another core
        os.sched_setaffinity(0, {core})
    gc.freeze()  # the parent's objects are not this process's garbage: collections stay short
    try:
        message = (True, body(rank, dist.FileStore(path, -1)))
    except BaseException:
        message = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(message))
    pipe.close()
    os._exit(0)  # no tear-down: a peer may still be in its last collective with nothing to wait for
