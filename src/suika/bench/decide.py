"""How long one scheduling decision takes, by cluster size.

A full cluster is run forward event by event: each sample is one arrival or one end, decided by the whole cycle
(board, hulls, plans, placement, checks) from the state that the decisions before have led to. Smallest gangs add up
to `demand` times the devices: how many jobs wait depends on it and on their number. Every job is elastic up to four
times its smallest gang and has a curve of its own, so that an arrival costs a new hull. Times are CPU seconds of the
one thread (`time.process_time`), since the machine may be shared; the first, cold decision is reported apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import typer

from suika.core.cluster import Cluster, parse_cluster_shorthand
from suika.core.decision import Action
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Option, ScalingCurve, Snapshot
from suika.schedule.cycle import run_cycle
from suika.schedule.policies import parse_policy
from suika.simulate.moves import FlatMoves

GANGS = np.array([1, 2, 4, 8, 16, 32])
GANG_SHARE = np.array([0.18, 0.15, 0.19, 0.25, 0.12, 0.11])  # mean 8.9 devices


def run(
    nodes: Annotated[int, typer.Option(help="Nodes of the cluster.")] = 128,
    devices_per_node: Annotated[int, typer.Option(help="Devices per node.")] = 8,
    jobs: Annotated[int, typer.Option(help="Jobs in the system.")] = 128,
    samples: Annotated[int, typer.Option(help="Decisions to time.")] = 300,
    policy: Annotated[str, typer.Option(help="Policy to time.")] = "suika",
    move_cost: Annotated[float, typer.Option(help="Seconds per move.")] = 30.0,
    demand: Annotated[float, typer.Option(min=0.01, max=10.0, help="Smallest gangs against devices.")] = 0.35,
    seed: Annotated[int, typer.Option(help="Seed of sizes, curves and lengths.")] = 0,
) -> dict[str, Any]:
    """Time whole scheduling decisions in a full cluster."""
    cluster = parse_cluster_shorthand(f"{nodes}x{devices_per_node}:H100")
    floor = _Floor(cluster, jobs, move_cost, demand, seed)
    chosen = parse_policy(policy)
    cold_s = floor.decide(chosen)
    for _ in range(20):  # until what a first decision leaves behind has settled
        floor.event()
        floor.decide(chosen)
    taken_s, used, queued = [], [], []
    for _ in range(samples):
        floor.event()
        taken_s.append(floor.decide(chosen))
        used.append(floor.utilisation)
        queued.append(floor.queued_share)
    taken_ms = np.array(taken_s) * 1e3
    return {
        "devices": cluster.num_devices,
        "jobs": jobs,
        "policy": policy,
        "demand": demand,
        "samples": samples,
        "decision_ms": {
            "p50": float(np.percentile(taken_ms, 50)),
            "p99": float(np.percentile(taken_ms, 99)),
            "max": float(taken_ms.max()),
            "mean": float(taken_ms.mean()),
        },
        "cold_decision_ms": cold_s * 1e3,
        "utilisation": float(np.mean(used)),
        "queued_share": float(np.mean(queued)),
        "changed_jobs_mean": floor.num_changed / (samples + 21),
    }


@dataclass
class _Floor:
    """A cluster with `num_jobs` jobs, in which decisions take effect at once and time passes between events."""

    cluster: Cluster
    num_jobs: int
    move_cost_s: float
    demand: float
    seed: int

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.moves = FlatMoves(self.move_cost_s)
        self.now_s, self.made, self.num_changed = 0.0, 0, 0
        self.views: dict[str, JobView] = {}
        while len(self.views) < self.num_jobs:
            self._arrive()

    def event(self) -> None:
        """An end if all jobs are there, else an arrival; the next in time at about the cluster's own pace."""
        self.now_s += float(self.rng.exponential(30.0))
        running = [job for job in self.views.values() if job.devices]
        if len(self.views) < self.num_jobs or not running:
            self._arrive()
            return
        shortest = sorted(running, key=lambda job: (job.remaining_at(self.now_s) * (job.step_s or 1.0), job.id))
        del self.views[shortest[int(self.rng.integers(min(8, len(shortest))))].id]

    def decide(self, policy: Any) -> float:
        """CPU seconds of one cycle, whose steps are then carried out."""
        snapshot = Snapshot(self.now_s, self.cluster, tuple(self.views.values()), self.moves)
        started = time.process_time()
        result = run_cycle(snapshot, policy)
        taken_s = time.process_time() - started
        for step in result.steps:
            decision = step.decision
            job, gets = self.views[decision.job_id], decision.action is not Action.PREEMPT
            self.num_changed += 1
            self.views[job.id] = replace(
                job,
                state=JobState.RUNNING if gets else JobState.QUEUED,
                layout=decision.layout,
                devices=decision.devices,
                remaining_steps=job.remaining_at(self.now_s),
                as_of_s=self.now_s,
                has_state=True,
                moving_until_s=self.now_s + self.move_cost_s if gets else None,
                interruptible=True,
            )
        return taken_s

    @property
    def utilisation(self) -> float:
        return sum(len(job.devices) for job in self.views.values()) / self.cluster.num_devices

    @property
    def queued_share(self) -> float:
        return sum(not job.devices for job in self.views.values()) / len(self.views)

    def _arrive(self) -> None:
        scale = self.demand * self.cluster.num_devices / self.num_jobs / float(GANGS @ GANG_SHARE)
        gang = max(1, round(float(self.rng.choice(GANGS, p=GANG_SHARE)) * scale))
        curve = _curve(gang, self.cluster, float(self.rng.uniform(0.6, 0.95)), float(self.rng.lognormal(0, 0.5)))
        seconds = float(self.rng.lognormal(8.0, 1.2))
        job = JobView(
            f"j{self.made:07}",
            JobState.QUEUED,
            self.now_s,
            remaining_steps=seconds / curve.options[0].step_s,
            done_steps=0.0,
            curve=curve,
            min_devices=gang,
            max_devices=4 * gang,
            as_of_s=self.now_s,
        )
        self.views[job.id] = job
        self.made += 1


def _curve(gang: int, cluster: Cluster, power: float, step_s: float) -> ScalingCurve:
    """Options at 1, 1.5, 2, 3 and 4 times the gang (whole nodes beyond one), rate ~ devices^power."""
    node = cluster.nodes[0].num_devices
    options = []
    for num in sorted({gang, gang * 3 // 2, 2 * gang, 3 * gang, 4 * gang}):
        whole, rest = divmod(num, node)
        shape = (node,) * whole + ((rest,) if rest else ())
        options.append(Option(shape, Layout(dp=num), step_s * (gang / num) ** power, ""))
    return ScalingCurve(tuple(options))
