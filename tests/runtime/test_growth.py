"""Many moves between two layouts: groups, descriptors, threads, memory and store keys stay flat from the third on."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest

from suika.runtime.events import StepDone

from .conftest import USER, Watched, plan, spec

BIG = {"family": "llama", "layers": 3, "hidden": 128, "ffn": 256, "heads": 4, "vocab": 512}
TWO = [("tp=2,pp=1,dp=2", "a0 a1 b0 b1"), ("tp=1,pp=2,dp=2", "b1 b0 a1 a0")]


def _count(job_run: Watched) -> dict[str, float]:
    """What rank processes and the store hold, summed over those that stay."""
    processes = [psutil.Process(m.pid) for m in job_run.gang.members.values()]
    ranks = [p for p, m in zip(processes, job_run.gang.members.values(), strict=True) if m.device is not None]
    return {
        "descriptors": sum(p.num_fds() for p in processes),
        "sockets": sum(len(p.net_connections("tcp")) for p in processes),
        "threads": sum(p.num_threads() for p in ranks),
        "store keys": next(m.said["pong", 0]["num_keys"] for m in job_run.gang.members.values() if m.device is None),
        "memory": sum(p.memory_full_info().uss for p in ranks),
    }


@pytest.mark.parametrize(
    "num_moves",
    [pytest.param(8, marks=pytest.mark.fault), pytest.param(20, marks=(pytest.mark.long, pytest.mark.timeout(300)))],
)
def test_nothing_grows_with_the_moves(run: Callable[..., Watched], num_moves: int) -> None:
    job = spec(model=BIG)
    job_run = run(job)
    plans = [plan(*layout, job) for layout in TWO]
    job_run.start(plans[0], 1).result(60)
    counts = []
    for move in range(num_moves):
        record = job_run.redeploy(plans[(move + 1) % 2], move + 2, USER).result(60)
        assert record.error is None
        job_run.wait(StepDone, generation=move + 2, step=record.cut_step + 2)
        counts.append(_count(job_run))
    memory = [count.pop("memory") for count in counts]
    for name in counts[0]:
        # The layouts differ: each is compared with its own first visit from the third move on.
        for first, last in ((counts[2], counts[-2]), (counts[3], counts[-1])):
            assert last[name] <= first[name] * 1.05, f"{name}: {[count[name] for count in counts]}"
    # A rank's memory of its own (what it shares with the fork server left out): a kept copy of its state would be 4 MB.
    assert (memory[-1] - memory[3]) / (num_moves - 4) / len(plans[0].devices) < 250_000, memory
