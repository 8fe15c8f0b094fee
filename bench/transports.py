"""Bytes from one process to another on this host, way by way, in one run.

    python bench/transports.py [--mib 1 16 256] [--laps 9]

Prints one JSON document: GiB/s on the receiver's clock and processor seconds per GiB of both processes together (which
other load on the machine disturbs less), each as median and range over the laps.
`gloo`: a send and a receive over loopback. `staged`, `in place`: a message through shared memory, from any tensor and
from memory that can be shown. `read`: a copy from a lent buffer, as moves do it; `compared`: with the comparison that
proves it. `adopt`: a whole lent buffer changes process; no byte is copied, only page tables are filled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from suika.reshard.bits import copied
from suika.reshard.transports import memfd
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.shared import Shared

CHUNK_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--laps", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="suika-bench-") as folder:
        found = measure(f"{folder}/store", arguments.mib, arguments.laps)
    print(json.dumps({"load": os.getloadavg()[0], "cases": found}, indent=2))


def measure(store: str, sizes_mib: list[int], laps: int) -> list[dict[str, Any]] | None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    processes = [context.Process(target=_process, args=(rank, store, sizes_mib, laps, theirs)) for rank in (0, 1)]
    for process in processes:
        process.start()
    found = mine.recv() if mine.poll(600) else None
    for process in processes:
        process.join(10)
        process.kill()
    return found


def _process(rank: int, store: str, sizes_mib: list[int], laps: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, timedelta(seconds=300))
    gloo = Gloo(group)  # type: ignore[arg-type]
    shared = Shared(rank, [1 - rank], gloo.all_gather)
    cases = [_case(rank, gloo, shared, mib << 20, laps) for mib in sizes_mib]
    if rank == 1:
        pipe.send(cases)
    gloo.all_gather(b"")
    os._exit(0)


def _case(rank: int, gloo: Gloo, shared: Shared, num_bytes: int, laps: int) -> dict[str, Any]:
    anywhere = torch.full((num_bytes,), rank + 1, dtype=torch.uint8)
    placed = memfd.placed(anywhere)
    lent = shared.lend({"buffer": placed})[1 - rank]
    source = lent.view("buffer")

    def message(transport: Any, buffer: torch.Tensor) -> Callable[[], None]:
        def once() -> None:
            (transport.recv(0, 0, anywhere) if rank else transport.send(1, 0, buffer)).wait()

        return once

    def read(compared: bool) -> Callable[[], None]:
        def once() -> None:
            for start in range(0, num_bytes if rank else 0, CHUNK_BYTES):
                want, got = source[start : start + CHUNK_BYTES], anywhere[start : start + CHUNK_BYTES]
                if compared:
                    assert copied(got, want)
                else:
                    got.copy_(want)

        return once

    ways = {
        "gloo": message(gloo, anywhere),
        "staged": message(shared, anywhere),
        "in place": message(shared, placed),
        "read": read(False),
        "compared": read(True),
    }
    figures: dict[str, Any] = {"mib": num_bytes >> 20}
    ways["adopt"] = lambda: lent.adopt("buffer")
    for name, once in ways.items():
        wall_s, processor_s = _seconds(gloo, once, laps)
        figures[name] = {
            "gib_per_s": _spread([num_bytes / 2**30 / seconds for seconds in wall_s]),
            "processor_s_per_gib": _spread([seconds / num_bytes * 2**30 for seconds in processor_s]),
        }
    return figures


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "range": [min(values), max(values)]}


def _seconds(gloo: Gloo, once: Callable[[], Any], laps: int) -> tuple[list[float], list[float]]:
    """Per lap: wall seconds here, processor seconds of both processes and all their threads."""
    wall_s, processor_s = [], []
    for _ in range(laps + 1):
        gloo.all_gather(b"")
        start, used = time.perf_counter(), time.process_time()
        once()
        wall_s.append(time.perf_counter() - start)
        own = time.process_time() - used
        processor_s.append(sum(struct.unpack("d", said)[0] for said in gloo.all_gather(struct.pack("d", own))))
    return wall_s[1:], processor_s[1:]


if __name__ == "__main__":
    main()
