"""A study: one workload under several policies and seeds, on one engine with one predictor and one move cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from suika.core.cluster import Cluster
from suika.core.errors import SpecError
from suika.core.quota import Quota, check_quotas
from suika.core.snapshot import MoveCost
from suika.schedule.policies import parse_policy
from suika.simulate.engine import Engine
from suika.simulate.faults import faults
from suika.simulate.metrics import lower_bound_avg_jct_s, numbers, over_seeds
from suika.simulate.moves import FlatMoves, predicted
from suika.simulate.predictor import Lengths, Predictor
from suika.simulate.times import Models
from suika.simulate.trace import Trace
from suika.simulate.workload import Workload, build
from suika.simulate.world import Failure, Outcome, Slowdown, World


@dataclass(frozen=True)
class Study:
    """What `suika simulate` is asked. `policies` are written `name` or `name:key=value,key=value`."""

    trace: Trace
    cluster: Cluster
    models: Models
    policies: tuple[str, ...] = ("suika",)
    move_cost: str = "model"
    lengths: Lengths = field(default_factory=Lengths)
    noise: float = 0.0
    seeds: tuple[int, ...] = (0,)
    load: float | None = None
    elastic_share: float = 1.0
    failures: str | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    failing_moves: float = 0.0  # share

    def world(self, seed: int) -> tuple[World, Workload]:
        workload = build(
            self.trace,
            self.cluster,
            self.models,
            seed=seed,
            load=self.load,
            elastic_share=self.elastic_share,
            quotas=self.quotas,
        )
        cost, interruptible = self._moves(workload)
        world = World(
            self.cluster,
            workload.jobs,
            cost,
            Predictor(self.lengths, self.noise, seed),
            quotas=self.quotas,
            interruptible=interruptible,
            failing_moves=self.failing_moves,
            seed=seed,
        )
        if self.failures is not None:
            horizon_s = 3 * max(job.submit_s for job in workload.jobs) + 30 * 86400.0
            found = faults(self.failures, self.cluster, horizon_s, seed)
            world = replace(
                world,
                failures=tuple(fault for fault in found if isinstance(fault, Failure)),
                slowdowns=tuple(fault for fault in found if isinstance(fault, Slowdown)),
            )
        return world, workload

    def _moves(self, workload: Workload) -> tuple[MoveCost, bool]:
        """(move cost, whether moves in flight may be interrupted)."""
        seconds = parse_move_cost(self.move_cost)
        if seconds is not None:
            return FlatMoves(seconds), True
        models = {job.id: job.model for job in workload.jobs}
        return predicted(self.models.shapes, models, self.cluster), False


@dataclass(frozen=True)
class Run:
    """One policy on one seed."""

    policy: str
    seed: int
    world: World
    outcome: Outcome
    numbers: Mapping[str, float]


def run(study: Study, progress: Callable[[str, int, int, int], None] | None = None) -> tuple[dict[str, Any], list[Run]]:
    """The study's document (see `suika simulate --json`) and its runs. `progress(policy, seed, jobs left, jobs)`."""
    check_quotas(study.quotas, study.cluster)
    runs: list[Run] = []
    bounds, workload = [], None
    named = [(text, parse_policy(text)) for text in study.policies]
    for seed in study.seeds:
        world, workload = study.world(seed)
        bounds.append(lower_bound_avg_jct_s(world))
        for text, policy in named:
            num = len(world.jobs)
            told = (lambda left, t=text, s=seed, n=num: progress(t, s, left, n)) if progress else None
            outcome = Engine(world, policy, on_end=told).run()
            runs.append(Run(text, seed, world, outcome, numbers(world, outcome)))
    assert workload is not None
    rows = [{"policy": text, **over_seeds([r.numbers for r in runs if r.policy == text])} for text, _ in named]
    return {
        "policies": rows,
        "lower_bound_avg_jct_s": sum(bounds) / len(bounds),
        "trace": study.trace.name,
        "cluster": study.cluster.name,
        "devices": study.cluster.num_devices,
        "load": workload.load,
        "seeds": list(study.seeds),
        "move_cost": study.move_cost,
        "curves": study.models.source,
        "models": workload.rule,
        "lengths": study.lengths.kind if not study.lengths.sigma else f"{study.lengths.kind}:{study.lengths.sigma:g}",
        "noise": study.noise,
        "failing_moves": study.failing_moves,
        "dirty_rows": [{"line": row.line, "reason": row.reason} for row in study.trace.dirty],
        "left_out": [{"place": row.line, "reason": row.reason} for row in workload.left_out],
    }, runs


def parse_policies(text: str) -> tuple[str, ...]:
    """Policies as written on a command line: `suika,rubick,suika:tax=4,spread=2` (a part with `=` goes on the last)."""
    found: list[str] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if "=" in part and ":" not in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    if not found:
        raise SpecError("policy", text, "names no policy")
    for policy in found:
        parse_policy(policy)
    return tuple(dict.fromkeys(found))


def parse_move_cost(text: str) -> float | None:
    """Seconds, or None for `model`."""
    if text == "model":
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise SpecError("move-cost", text, "neither 'model' nor a number of seconds", "write --move-cost 30")
    return seconds


def seeds_of(num: int) -> tuple[int, ...]:
    if num < 1:
        raise SpecError("seeds", num, "must be at least 1")
    return tuple(range(num))
