"""The figures of docs/numbers/reshard.md that `suika bench` does not give: `python tests/reshard/measure.py [chunks]`.

Times are CPU times (of all processes together), which other work on the machine changes little.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import labels
import torch
from processes import run_forked

import suika.reshard.exchange as exchange
from suika.bench.moves import MODELS
from suika.core.cluster import parse_cluster_shorthand
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.plan import Placement, Plan
from suika.reshard.assignment import assign
from suika.reshard.bits import copied
from suika.reshard.buffers import allocate
from suika.reshard.cells import groups_of
from suika.reshard.execute import execute
from suika.reshard.hashing import host_hash
from suika.reshard.moveplan import plan_move
from suika.reshard.predict import GPU, predict, predict_move
from suika.reshard.state import JobShape, buffer_specs
from suika.reshard.transports.gloo import Gloo


def cpu_s(body: Callable[[], object], times: int = 1) -> float:
    start = time.process_time()
    for _ in range(times):
        body()
    return (time.process_time() - start) / times


def hashes() -> None:
    for mib in (1, 256):
        source = torch.randn(mib << 18)
        target = source.clone()
        bodies = {
            "hash": partial(host_hash, source),
            "copy": partial(target.copy_, source),
            "copy, compared": partial(copied, target, source),
        }
        for name, body in bodies.items():
            body()
            print(f"{name}, {mib} MiB: {(mib << 20) / cpu_s(body, 2048 // mib) / 1e9:.1f} GB/s")


def predictions() -> None:
    model = MODELS["llama-70b"]
    shape = JobShape(model, 4096, "bf16")
    for dp, nodes in ((2, 8), (32, 128)):
        cluster = parse_cluster_shorthand(f"{nodes}x8:H100")
        for buckets in ("layer", "stage"):
            old = Plan(Layout(tp=8, pp=4, dp=dp, zero_buckets=buckets).resolve(model), Placement(cluster.devices))
            layout = Layout(tp=8, pp=2, dp=2 * dp, zero_buckets=buckets).resolve(model)
            new = Plan(layout, Placement(assign(shape, old, layout, cluster.devices, cluster)))
            predict_move.cache_clear()
            groups_of.cache_clear()
            cold = cpu_s(lambda o=old, n=new, c=cluster: predict(shape, o, n, c, GPU))
            cached = cpu_s(lambda o=old, n=new, c=cluster: predict(shape, o, n, c, GPU), 200)
            print(
                f"predict, {8 * nodes} ranks, {buckets} buckets: cold {cold * 1e3:.1f} ms, cached {cached * 1e3:.3f} ms"
            )


def chunks() -> None:
    """CPU seconds of one move of 407 MB between 8 participants over gloo, by chunk size and window."""
    model = ModelSpec("25m", "llama", 8, 512, 1376, 8, 8192)
    shape, cluster = JobShape(model, 256, "fp32"), labels.cluster(2, 4)
    old = labels.plan(shape, Layout(tp=2, pp=2, dp=2), cluster.devices)
    layout = Layout(tp=1, pp=2, dp=4).resolve(model)
    new = Plan(layout, Placement(assign(shape, old, layout, cluster.devices, cluster)))
    grid = [(kib, window) for kib in (256, 1024, 2048, 4096, 8192, 16384) for window in (4, 8)]
    moves = {kib: plan_move(shape, old, new, cluster, chunk_bytes=kib << 10) for kib, _ in grid}

    def body(rank: int, transport: Gloo) -> dict[tuple[int, int], float]:
        device = cluster.devices[rank]
        specs = buffer_specs(model, old.layout, 256, "fp32", rank)
        state = {name: torch.full(size, float(len(name))) for name, (size, _) in specs.items()}
        buffers = allocate(moves[4096], rank, state)
        spent = {}
        for kib, window in grid:
            exchange.WINDOW = window
            spent[kib, window] = min(
                cpu_s(lambda k=kib: execute(moves[k], device, state, transport, buffers)) for _ in range(3)
            )
        return spent

    results = run_forked(8, Path(tempfile.mkdtemp()), body, timeout_s=500)
    for kib, window in grid:
        total = sum(result[kib, window] for result in results)
        print(f"chunks of {kib} KiB, window {window}: {total:.2f} CPU s for {moves[kib].moved_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for measure in (chunks,) if "chunks" in sys.argv else (hashes, predictions):
        measure()
