"""Step times of tiny jobs in several layouts, and what a small message costs.

Run: .venv/bin/python tests/train/measure.py

Prints the median of 20 steps (and the fastest) as wall time, and the CPU time per step summed over ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from ranks import run_ranks  # noqa: E402
from twins import job, llama, text, trainer  # noqa: E402

from suika.core.layout import Layout  # noqa: E402
from suika.core.mesh import Mesh  # noqa: E402
from suika.runtime.groups import build_groups  # noqa: E402
from suika.train.axis import Axis  # noqa: E402

LAYOUTS = [Layout(), Layout(dp=2), Layout(pp=2), Layout(tp=2), Layout(tp=2, pp=2, dp=2)]


def step_times(layout: Layout, micro_batch: int, num_steps: int = 20) -> tuple[float, float, float]:
    """Median and fastest step in seconds of the slowest rank; CPU seconds per step of all ranks."""
    spec = job(llama(), "fp32")
    layout = Layout(**{**layout.to_dict(), "layers_per_stage": (), "micro_batch": micro_batch})

    def body(rank: int, store: dist.Store) -> tuple[list[float], float]:
        program = trainer(spec, layout, rank, store)
        program.bind(program.initialise())
        for _ in range(3):
            program.step(())
        times, used = [], time.process_time()
        for _ in range(num_steps):
            start = time.perf_counter()
            program.step(())
            times.append(time.perf_counter() - start)
        return times, (time.process_time() - used) / num_steps

    ranks = run_ranks(layout.num_ranks, body, 120)
    slowest = [max(step) for step in zip(*(times for times, _ in ranks), strict=True)]
    return statistics.median(slowest), min(slowest), sum(cpu for _, cpu in ranks)


def message_times(size: int, num_bytes: int, num_calls: int = 200) -> dict[str, float]:
    """Median seconds to sum a tensor over `size` ranks: gloo's all-reduce, and `Axis.sum`."""

    def body(rank: int, store: dist.Store) -> dict[str, float]:
        group = build_groups(store, "m", Mesh(Layout(tp=size)), rank, 30).tp
        assert group is not None
        axis, tensor = Axis.of("tp", group), torch.ones(num_bytes // 4)
        return {
            "all_reduce": _median(lambda: group.allreduce([tensor]).wait(), num_calls),
            "Axis.sum": _median(lambda: axis.sum(tensor), num_calls),
        }

    return run_ranks(size, body)[0]


def _median(call: Callable[[], object], num_calls: int) -> float:
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    text()
    for size in (2, 4):
        for num_bytes in (4096, 65536, 1 << 20):
            found = ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in message_times(size, num_bytes).items())
            print(f"sum of {num_bytes} bytes over {size} ranks: {found}")
    for micro_batch in (1, 2):
        for layout in LAYOUTS:
            median, fastest, cpu = (1e3 * t for t in step_times(layout, micro_batch))
            print(f"{layout} mb{micro_batch}: step {median:.0f} ms (fastest {fastest:.0f}), CPU {cpu:.0f} ms")
