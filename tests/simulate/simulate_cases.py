"""Builders of small worlds for tests of the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from suika.core.cluster import parse_cluster_shorthand
from suika.core.layout import Layout
from suika.core.snapshot import Option, ScalingCurve
from suika.schedule.policies import load
from suika.simulate.engine import Engine
from suika.simulate.jobs import SimJob
from suika.simulate.moves import FlatMoves
from suika.simulate.world import Outcome, World


def curve(power: float = 0.8, step_s: float = 1.0, sizes: tuple[int, ...] = (1, 2, 4, 8, 16)) -> ScalingCurve:
    """Rate ~ devices^power on nodes of 8."""
    options = []
    for num in sizes:
        shape = (8,) * (num // 8) + ((num % 8,) if num % 8 else ())
        options.append(Option(shape, Layout(dp=num), step_s / num**power, ""))
    return ScalingCurve(tuple(options))


def sim_job(name: str, submit_s: float, steps: float, known: ScalingCurve | None = None, **changes: Any) -> SimJob:
    base: dict[str, Any] = {"min_devices": 1, "max_devices": 8, "requested_devices": 2}
    return SimJob(name, submit_s, steps, known or curve(), **(base | changes))


def world(*jobs: SimJob, cluster: str = "2x8:H100", pause_s: float = 10.0, **changes: Any) -> World:
    ordered = tuple(sorted(jobs, key=lambda j: (j.submit_s, j.id)))
    return World(parse_cluster_shorthand(cluster), ordered, FlatMoves(pause_s), **({"interruptible": True} | changes))


def random_jobs(seed: int, num: int = 20, load: float = 1.2) -> list[SimJob]:
    """Jobs that ask 16 devices for about `load` times what they have."""
    rng = np.random.default_rng(seed)
    jobs, now_s = [], 0.0
    for i in range(num):
        asked = int(rng.choice([1, 2, 4, 8]))
        known = curve(float(rng.uniform(0.4, 0.95)), float(rng.uniform(0.5, 2.0)))
        seconds = float(rng.lognormal(5.5, 1.3))
        steps = seconds / next(o.step_s for o in known.options if o.num_devices == asked)
        low, high = max(1, asked // 4), min(4 * asked, 16)
        tenant = str(rng.choice(["red", "blue"]))
        jobs.append(
            sim_job(
                f"j{i:02}",
                now_s,
                steps,
                known,
                min_devices=low,
                max_devices=high,
                requested_devices=asked,
                tenant=tenant,
                priority=int(rng.choice([0, 0, 0, 1])),
            )
        )
        now_s += float(rng.exponential(seconds * asked / 16 / load))
    return jobs


def simulate(where: World, policy: str = "suika", **parameters: Any) -> Outcome:
    return Engine(where, load(policy, **parameters)).run()


def mean_jct_s(outcome: Outcome) -> float:
    return float(np.mean([record.jct_s for record in outcome.records]))
