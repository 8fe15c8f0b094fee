"""Participants as forked processes with a gloo group, for tests: torch is already imported, so they are up at once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from suika.reshard.transports.gloo import Gloo

Body = Callable[[int, Gloo], Any]


def run_forked(size: int, folder: Path, body: Body, timeout_s: float = 40.0) -> list[Any]:
    """`body(rank, transport)` in `size` processes; their results by rank. Raises when one raises or is late."""
    context = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(rank, size, folder / "rendezvous", body, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        return [_result(rank, pipe, timeout_s) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()


def _result(rank: int, pipe: Connection, timeout_s: float) -> Any:
    if not pipe.poll(timeout_s):
        raise TimeoutError(f"rank {rank} has not answered within {timeout_s} s")
    ok, value = pipe.recv()
    if not ok:
        raise RuntimeError(f"rank {rank}: {value}")
    return value


def _child(rank: int, size: int, rendezvous: Path, body: Body, pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, body(rank, Gloo(gloo_group(rank, size, rendezvous)))))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)  # neither pytest's nor gloo's exit handlers belong to the child


def gloo_group(rank: int, size: int, rendezvous: Path, timeout_s: float = 20.0) -> dist.ProcessGroup:
    """A group that is not registered with torch.distributed, as the runtime makes them."""
    store = dist.FileStore(str(rendezvous), size)
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))  # type: ignore[return-value]
