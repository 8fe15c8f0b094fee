"""One loop, two worlds: the live controller and the simulator decide alike about the same three jobs.

The story is keyed to progress, so that both worlds tell the same one: gpt arrives when llama has done ten steps, small
when gpt has ended and llama has grown back. Both decide by the estimator's word: what a busy machine shows of its
steps is set aside here, since the simulated one shows nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from live import Live

from suika.control.learned import Learned
from suika.core.job import JobSpec, JobState, parse_job
from suika.core.snapshot import ScalingCurve
from suika.plan.curves import curve_of_job
from suika.reshard.predict import MovePredictor
from suika.reshard.state import JobShape
from suika.schedule.cycle import CycleResult
from suika.schedule.policies import load
from suika.simulate.engine import Engine
from suika.simulate.jobs import SimJob
from suika.simulate.world import World

pytestmark = pytest.mark.timeout(240)

# Large enough that eight devices are worth having, by the estimator's word.
LLAMA = {"family": "llama", "layers": 8, "hidden": 64, "ffn": 160, "heads": 4, "kv_heads": 2, "vocab": 257}
GPT = {"family": "gpt", "layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257, "tied": True}
FILES = {
    "llama": {
        "model": LLAMA,
        "global_batch": 32,
        "sequence_length": 64,
        "steps": 4000,
        "devices": {"min": 1, "max": 8},
    },
    "gpt": {"model": GPT, "global_batch": 4, "steps": 60, "devices": {"min": 2, "max": 4}},
    "small": {"model": GPT, "global_batch": 2, "steps": 40, "devices": {"min": 1, "max": 2}},
}


class Decided(NamedTuple):
    job: str
    action: str
    layout: str
    num_devices: int


def play_live(live: Live) -> list[Decided]:
    """Decisions up to small's end and llama's growth after it."""

    def whole(name: str) -> bool:
        job = live.scene.job(name)
        return job is not None and job.state is JobState.RUNNING and job.plan.layout.num_ranks == 8

    names = {live.submit("llama", **FILES["llama"]): "llama"}
    live.wait("ten steps", lambda: live.scene.steps("llama") >= 10)
    names[live.submit("gpt", **FILES["gpt"])] = "gpt"
    live.wait("gpt's end", lambda: live.scene.ended("gpt"), 100)
    live.wait("llama grown back", lambda: whole("llama") and live.scene.settled("llama"), 100)
    names[live.submit("small", **FILES["small"])] = "small"
    live.wait("small's end", lambda: live.scene.ended("small"), 100)
    live.wait("llama grown back", lambda: whole("llama") and live.scene.settled("llama"), 100)
    decided = [
        Decided(names[e["job_id"]], e["data"]["action"], _cut(e["data"]["layout"]), len(e["data"]["devices"]))
        for e in live.api.events(limit=100_000)
        if e["kind"] == "decided" and e["job_id"] in names
    ]
    failed = [e for e in live.api.events(limit=100_000) if e["kind"] == "move-failed" and e["job_id"] in names]
    assert not failed  # other tests of this cluster make moves fail on purpose
    return decided


def _cut(layout: dict) -> str:
    return " ".join(f"{axis}{layout[axis]}" for axis in ("tp", "pp", "dp"))


def play_simulated(specs: dict[str, JobSpec], curves: dict[str, ScalingCurve], cluster) -> list[Decided]:
    """The same story on the simulated clock; `curves` are true and known."""

    def simulate(submit_s: dict[str, float]) -> tuple[list[Decided], dict[str, float]]:
        jobs = [
            SimJob(name, at_s, float(specs[name].steps), curves[name], specs[name].devices.min, specs[name].devices.max)
            for name, at_s in submit_s.items()
        ]
        shapes = {name: JobShape.of(specs[name]) for name in submit_s}
        decided: list[Decided] = []

        def note(result: CycleResult) -> None:
            for decision in result.decisions:
                layout = _cut(decision.layout.to_dict())
                decided.append(Decided(decision.job_id, str(decision.action), layout, len(decision.devices)))

        engine = Engine(World(cluster, tuple(jobs), MovePredictor.of(shapes, cluster)), load("suika"), on_cycle=note)
        outcome = engine.run()
        return decided, {record.job.id: record.end_s for record in outcome.records}

    moves = MovePredictor.of({"llama": JobShape.of(specs["llama"])}, cluster)
    first_step_s = moves.typical(SimJob("llama", 0.0, 1.0, curves["llama"], 1, 8).first_view(curves["llama"]))
    whole_s = min(option.step_s for option in curves["llama"].options)
    submit_s = {"llama": 0.0, "gpt": first_step_s + 10 * whole_s}
    _, ended_s = simulate(submit_s)
    submit_s["small"] = ended_s["gpt"] + 1.0 + 10 * whole_s
    decided, _ = simulate(submit_s)
    return decided


@pytest.mark.fault  # real processes, 20 s
def test_both_worlds_decide_alike(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learned, "settle", lambda *_: None)
    monkeypatch.setattr(Learned, "of", lambda *_: ())  # nor what jobs of earlier tests have taught
    decided = play_live(live)
    specs = {name: parse_job(live.file(name, **changes)) for name, changes in FILES.items()}
    cluster = live.service.backend.cluster
    curves = {name: curve_of_job(spec, cluster) for name, spec in specs.items()}
    simulated = play_simulated(specs, curves, cluster)
    assert [d.action for d in decided] == ["start", "redeploy", "start", "redeploy", "redeploy", "start", "redeploy"]
    assert simulated[: len(decided)] == decided
