"""Every check that needs an NVIDIA device, in one call; prints a table (or, with --json, one document).

    python bench/gpu_check.py [--json] [--only NAME ...]

Each check reports ok, failed or skipped, with figures. Those between processes use spawned ones, several on one device;
NCCL refuses that and needs two devices. Exit status 1 if one failed, 2 if there was no device at all.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from suika.bench.bare import is_labelled, labelled
from suika.core.cluster import Cluster, Node
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.reshard.execute import execute
from suika.reshard.hashing import tensor_hashes
from suika.reshard.moveplan import plan_move
from suika.reshard.state import JobShape
from suika.reshard.transports.base import Transport
from suika.reshard.transports.cuda_ipc import CudaIpc
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.nccl import Nccl
from suika.runtime.groups import build_nccl_group
from suika.runtime.ways import open_way

MIB = 1 << 20
WAIT_S = 120.0
Figures = dict[str, Any]


class Skip(Exception):  # noqa: N818 - not an error
    """The check cannot run here."""


def median_s(body: Callable[[], Any], laps: int = 7) -> float:
    """Seconds of `body` on the current device, the first call left out."""
    times = []
    for _ in range(laps + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        body()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


# -- processes --------------------------------------------------------------------------------------------------------


def in_processes(size: int, body: Callable[[int, Gloo], Any]) -> list[Any]:
    """`body(rank, gloo)` in spawned processes; their results by rank. Raises what the first failing one raised."""
    with tempfile.TemporaryDirectory(prefix="suika-gpu-") as folder:
        return _run(size, body, f"{folder}/store")


def _run(size: int, body: Callable[[int, Gloo], Any], store: str) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_process, args=(rank, size, store, body, results)) for rank in range(size)]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < size:
            rank, error, value = results.get(timeout=WAIT_S)
            if error:
                raise RuntimeError(f"rank {rank}: {error}")
            found[rank] = value
    except queue.Empty:
        raise RuntimeError(f"no answer within {WAIT_S:.0f} s from {sorted(set(range(size)) - set(found))}") from None
    finally:
        for process in processes:
            process.join(5 if len(found) == size else 0)
            if process.is_alive():
                process.kill()
                process.join()
    return [found[rank] for rank in range(size)]


def _process(rank: int, size: int, path: str, body: Callable[[int, Gloo], Any], results: Any) -> None:
    torch.set_num_threads(1)
    try:
        group = dist.ProcessGroupGloo(dist.FileStore(path, size), rank, size, timedelta(seconds=60))
        gloo = Gloo(group)  # type: ignore[arg-type]
        value = body(rank, gloo)
        gloo.all_gather(b"")  # exporters outlive their readers
        results.put((rank, "", value))
    except BaseException:
        results.put((rank, traceback.format_exc(), None))


def ipc(rank: int, gloo: Gloo) -> CudaIpc:
    peers = [peer for peer in range(gloo.size) if peer != rank]
    return CudaIpc(rank, peers, gloo.all_gather, torch.device("cuda", 0))


def pattern(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


def swap(rank: int, transport: Transport, num_bytes: int) -> Figures:
    """Both send to each other at once; bytes per second into one of them."""
    peer, mine = 1 - rank, pattern(num_bytes, rank)
    arrived = torch.zeros_like(mine)

    def once() -> None:
        sending, receiving = transport.send(peer, 0, mine), transport.recv(peer, 0, arrived)
        sending.wait()
        receiving.wait()

    seconds = median_s(once, 5)
    return {"exact": torch.equal(arrived, pattern(num_bytes, peer)), "gib_per_s": num_bytes / seconds / 2**30}


def move(rank: int, transport: Transport, device: str = "cuda") -> Figures:
    """Labelled state on a device goes from tp2 to pp2 and back: packing, kept buffers, hashing, peak memory."""
    cluster = Cluster((Node("n", 2, "cpu"),))
    model = ModelSpec("check", "llama", layers=4, hidden=1024, ffn=2816, heads=16, vocab=8000)
    shape, length = JobShape(model, 64, "bf16"), 64
    old = Plan(Layout(tp=2).resolve(model), Placement(cluster.devices))
    new = Plan(Layout(pp=2).resolve(model), Placement(cluster.devices))
    there, back = plan_move(shape, old, new, cluster), plan_move(shape, new, old, cluster)
    first = {name: t.to(device) for name, t in labelled(there.old, rank, model, length).items()}
    middle, report = execute(there, cluster.devices[rank], first, transport)
    last, _ = execute(back, cluster.devices[rank], middle, transport)
    exact = is_labelled(there.new, rank, model, length, {name: t.cpu() for name, t in middle.items()})
    exact &= is_labelled(there.old, rank, model, length, {name: t.cpu() for name, t in last.items()})
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {"exact": exact, "received_mib": report.received_bytes / MIB, "transfer_s": report.phase_s["transfer"],
            "hash_s": report.phase_s["hash"], "kept_mib": report.kept_bytes / MIB, "peak_mib": peak / MIB}  # fmt: skip


def _swap_ipc(rank: int, gloo: Gloo) -> Figures:
    return swap(rank, ipc(rank, gloo), 256 * MIB)


def _swap_gloo(rank: int, gloo: Gloo) -> Figures:
    return swap(rank, gloo, 64 * MIB)


def _move_ipc(rank: int, gloo: Gloo) -> Figures:
    return move(rank, ipc(rank, gloo))


def _move_gloo(rank: int, gloo: Gloo) -> Figures:
    return move(rank, gloo)


def _move_way(rank: int, gloo: Gloo) -> Figures:
    """As a job's ranks move: the way that the runtime chooses for state on a GPU, weights before all else."""
    path, *_ = gloo.all_gather(tempfile.mkdtemp(prefix="suika-way-").encode())
    store = dist.FileStore(f"{path.decode()}/store", gloo.size)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    way = open_way(gloo.group, [0] * gloo.size, device, store, "check", 60.0)
    figures = move(rank, way.transport)
    way.close()
    return figures


def _swap_nccl(rank: int, gloo: Gloo) -> Figures:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    path, *_ = gloo.all_gather(tempfile.mkdtemp(prefix="suika-nccl-").encode())
    store = dist.FileStore(f"{path.decode()}/store", gloo.size)
    group = build_nccl_group(store, "check", rank, gloo.size, 60.0, device)
    return swap(rank, Nccl(group, gloo, device), 256 * MIB)


# -- the checks -------------------------------------------------------------------------------------------------------


def check_environment() -> Figures:
    properties = torch.cuda.get_device_properties(0)
    return {"device": properties.name, "devices": torch.cuda.device_count(), "torch": torch.__version__,
            "cuda": torch.version.cuda, "memory_gib": properties.total_memory / 2**30}  # fmt: skip


def check_hash() -> Figures:
    """The same keyed sums as on a CPU, at memory speed."""
    data = pattern(1024 * MIB, 3)
    small = data[: 5 * MIB + 13]
    if tensor_hashes([small]) != tensor_hashes([small.cpu()]):
        raise AssertionError("the device's hash differs from the CPU's")
    changed = data.clone()
    changed[777_777_777] ^= 1
    if tensor_hashes([changed]) == tensor_hashes([data]):
        raise AssertionError("a changed byte went unnoticed")
    return {"gib_per_s": 1 / median_s(lambda: tensor_hashes([data]))}


def check_copy() -> Figures:
    source, target = pattern(1024 * MIB, 0), torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    return {"gib_per_s": 1 / median_s(lambda: target.copy_(source))}


def check_cuda_ipc() -> Figures:
    return exact(in_processes(2, _swap_ipc))


def check_gloo() -> Figures:
    return exact(in_processes(2, _swap_gloo))


def check_move_cuda_ipc() -> Figures:
    return exact(in_processes(2, _move_ipc))


def check_move_gloo() -> Figures:
    return exact(in_processes(2, _move_gloo))


def check_move_way() -> Figures:
    return exact(in_processes(2, _move_way))


def check_nccl() -> Figures:
    if torch.cuda.device_count() < 2:
        raise Skip("NCCL needs a device per rank: one found")
    return exact(in_processes(2, _swap_nccl))


def check_profiler() -> Figures:
    """What recorded spans cost a step of about 10 ms whose spans are device events."""
    from suika.runtime import profiler

    torch.zeros(1, device="cuda")
    weights = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        x = weights
        for _ in range(40):
            with profiler.span("forward"):
                x = (x @ weights).clamp(-1, 1)

    plain_s = median_s(step)
    profiler._recording = recording = profiler._Recording()
    try:
        recorded_s = median_s(step)
        recording.settle()
    finally:
        profiler._recording = None
    share = sum(recording.seconds.values()) / (8 * recorded_s)
    return {"plain_ms": plain_s * 1e3, "recorded_ms": recorded_s * 1e3, "overhead": recorded_s / plain_s - 1,
            "explained": share}  # fmt: skip


def check_trainer() -> Figures:
    raise Skip("the built-in trainer keeps its buffers on the CPU")


def exact(results: list[Figures]) -> Figures:
    """The slowest participant's figures; raises unless all of them found every byte right."""
    if not all(result["exact"] for result in results):
        raise AssertionError(f"bytes arrived changed: {results}")
    return {name: (min if name == "gib_per_s" else max)(r[name] for r in results) for name in results[0]}


CHECKS: dict[str, Callable[[], Figures]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", nargs="*", choices=list(CHECKS), default=list(CHECKS))
    arguments = parser.parse_args()
    found = torch.cuda.is_available()
    report = [run(name, found) for name in arguments.only]
    if arguments.json:
        print(json.dumps({"checks": report}, indent=2))
    else:
        for row in report:
            figures = "  ".join(
                f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row["figures"].items()
            )
            print(f"{row['check']:14} {row['result']:8} {row['seconds']:6.1f} s  {row['why'] or figures}")
    if not found:
        print("no NVIDIA device: nothing was checked", file=sys.stderr)
        return 2
    return int(any(row["result"] == "failed" for row in report))


def run(name: str, found: bool) -> dict[str, Any]:
    start, figures, result, why = time.perf_counter(), {}, "ok", ""
    try:
        if not found:
            raise Skip("no NVIDIA device")
        figures = CHECKS[name]()
    except Skip as reason:
        result, why = "skipped", str(reason)
    except Exception as error:
        result, why = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    return {"check": name, "result": result, "seconds": time.perf_counter() - start, "why": why, "figures": figures}


if __name__ == "__main__":
    sys.exit(main())
