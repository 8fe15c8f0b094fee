"""Twenty random moves of the built-in trainer, in every mode, against the same job in one process that never moves."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import pytest

from suika.backends.local import LocalBackend
from suika.core.errors import SpecError
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.runtime.coordinator import PROGRAM
from suika.runtime.events import Outcome, StepDone
from suika.train.data import prepare

from .conftest import CLUSTER, USER, Watched, plan, spec

MODELS = {
    "llama": {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "kv_heads": 2, "vocab": 257},
    "gpt-tied": {"family": "gpt", "layers": 3, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257, "tied": True},
}
MOST_STEPS = 2000


def _random_plan(job: JobSpec, rng: random.Random) -> Plan:
    """Any layout that the job may have, on any devices in any order."""
    while True:
        sizes = {"tp": rng.choice((1, 2, 4)), "pp": rng.choice((1, 2, 3)), "dp": rng.choice((1, 2, 3))}
        layout = Layout(**sizes, zero_buckets=rng.choice(("layer", "stage")), micro_batch=rng.choice((1, 2)))
        if layout.num_ranks > 4:  # two cores
            continue
        devices = tuple(rng.sample(CLUSTER.devices, layout.num_ranks))
        try:
            return Plan.checked(layout, devices, job.model, job.global_batch, job.sequence_length, CLUSTER)
        except SpecError:
            continue


@pytest.mark.long
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", MODELS)
def test_losses_over_twenty_random_moves(backend: LocalBackend, tmp_path: Path, name: str) -> None:
    prepare(sysconfig.get_paths()["stdlib"], tmp_path / "text.bin", pattern="*.py", max_bytes=200_000)
    optimizer = {"lr": 3e-3, "warmup_steps": 2, "decay": "constant"}
    job = spec(model=MODELS[name], global_batch=12, sequence_length=16, steps=MOST_STEPS, seed=3, optimizer=optimizer)
    rng = random.Random(7)

    def begin(folder: str) -> Watched:
        return Watched(job, backend, tmp_path / folder, program=PROGRAM, data_path=str(tmp_path / "text.bin"))

    def losses(job_run: Watched) -> dict[int, float]:
        return {event.step: event.loss for event in job_run.events if isinstance(event, StepDone)}

    moved = begin("moved")
    moved.start(_random_plan(job, rng), 1).result(60)
    for generation in range(2, 22):
        how = rng.choice(({"mode": "lean"}, {"weights_first": True}, {"weights_first": False}))
        record = moved.redeploy(_random_plan(job, rng), generation, USER, **how).result(90)
        assert record.error is None
        moved.wait(StepDone, generation=generation)
    last = moved.preempt().result(60)
    assert last.outcome == Outcome.PREEMPTED
    twin = begin("twin")
    twin.start(plan("tp=1,pp=1,dp=1", "a0", job), 1).result(60)
    twin.wait(StepDone, timeout_s=200, step=last.step)
    twin.close()
    ours, theirs = losses(moved), losses(twin)
    assert sorted(ours) == list(range(1, last.step + 1))
    worst = max(abs(ours[step] - theirs[step]) for step in ours)
    print(f"{name}: 20 moves in {last.step} steps, largest difference of losses {worst:.1e}")
    assert worst < 1e-9
