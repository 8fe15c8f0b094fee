"""Builders of small clusters, curves, jobs and snapshots for tests of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from suika.core.cluster import Cluster, Device, parse_cluster_shorthand
from suika.core.decision import Action
from suika.core.job import JobState
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Move, Option, ScalingCurve, Snapshot
from suika.schedule.cycle import CycleResult
from suika.schedule.policies import NAMES

POLICIES = tuple(NAMES)


@dataclass(frozen=True)
class Flat:
    """A move cost: the same pause for everything, devices free at once or after `release_s`."""

    pause_s: float = 10.0
    release_s: float = 0.0

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        return Move(self.pause_s, self.release_s)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return self.pause_s


def curve(
    sizes: Sequence[int] = (1, 2, 4, 8, 16), *, power: float = 0.8, step_s: float = 1.0, node: int = 8
) -> ScalingCurve:
    """Rate ~ devices^power, on as few nodes of `node` as can be, and spread evenly over twice as many (10 % slower)."""
    options = []
    for num in sizes:
        whole, rest = divmod(num, node)
        shape = (node,) * whole + ((rest,) if rest else ())
        step = step_s / num**power
        options.append(Option(shape, Layout(dp=num), step, ""))
        wide = 2 * len(shape)
        if num % wide == 0 and num > 1:
            options.append(Option((num // wide,) * wide, Layout(dp=num), step * 1.1, ""))
    return ScalingCurve(tuple(options))


def job(name: str, steps: float = 1000.0, known: ScalingCurve | None = None, **changes: Any) -> JobView:
    """A waiting job of 1 to 16 devices."""
    base: dict[str, Any] = {"min_devices": 1, "max_devices": 16, "submitted_s": 0.0}
    base |= changes
    return JobView(name, JobState.QUEUED, remaining_steps=steps, done_steps=0.0, curve=known or curve(), **base)


def on(view: JobView, *devices: str, layout: Layout | None = None) -> JobView:
    """The job running on `devices`, each written node/index."""
    held = tuple(Device.parse(text) for text in devices)
    return replace(
        view, state=JobState.RUNNING, devices=held, layout=layout or Layout(dp=len(held)), started_s=0.0, has_state=True
    )


def snapshot(cluster: Cluster | str, *jobs: JobView, now_s: float = 100.0, **changes: Any) -> Snapshot:
    where = parse_cluster_shorthand(cluster) if isinstance(cluster, str) else cluster
    ordered = tuple(sorted(jobs, key=lambda j: (j.submitted_s, j.id)))
    return Snapshot(now_s, where, ordered, changes.pop("move_cost", Flat()), **changes)


def after(result: CycleResult, now_s: float | None = None) -> Snapshot:
    """The snapshot once every step is done, at once and for free."""
    before = result.snapshot
    views = {view.id: view for view in before.jobs}
    for step in result.steps:
        decision, view = step.decision, views[step.decision.job_id]
        gets = decision.action is not Action.PREEMPT
        views[view.id] = replace(
            view,
            state=JobState.RUNNING if gets else JobState.QUEUED,
            devices=decision.devices,
            layout=decision.layout,
            has_state=True,
            last_change_s=before.now_s,
        )
    return replace(before, now_s=before.now_s if now_s is None else now_s, jobs=tuple(views.values()))


def check_floor(state: Snapshot) -> None:
    """Nobody shares a device, stands where nothing may stand, or holds a part of its gang."""
    held = [device for view in state.jobs for device in view.devices]
    assert len(held) == len(set(held))
    assert not set(held) & set(state.down)
    for view in state.jobs:
        assert not view.devices or view.min_devices <= len(view.devices) <= view.max_devices
        assert not view.devices or view.layout is not None
        if view.devices:
            assert view.layout.num_ranks == len(view.devices)


def random_snapshot(seed: int, nodes: int = 4, num_jobs: int = 10) -> Snapshot:
    """Some jobs running where they fit, some waiting; priorities, a draining node, down devices now and then."""
    rng = np.random.default_rng(seed)
    cluster = parse_cluster_shorthand(f"{nodes}x8:H100")
    free = {node.name: list(node.devices) for node in cluster.nodes}
    jobs = []
    for i in range(num_jobs):
        low = int(rng.choice([1, 1, 2, 4, 8]))
        view = job(
            f"j{i:02}",
            float(rng.lognormal(6, 2)),
            curve(power=float(rng.uniform(0.3, 1.0)), step_s=float(rng.uniform(0.2, 3))),
            min_devices=low,
            max_devices=int(low * rng.choice([1, 2, 4])),
            submitted_s=float(i),
            priority=int(rng.choice([0, 0, 0, 1])),
            requested_devices=low,
            tenant=str(rng.choice(["red", "blue"])),
        )
        fits = [o for o in view.curve.options if low <= o.num_devices <= view.max_devices and len(o.shape) == 1]
        if fits and rng.random() < 0.6:
            option = fits[int(rng.integers(len(fits)))]
            home = next((name for name, left in free.items() if len(left) >= option.num_devices), None)
            if home is not None:
                taken = [free[home].pop(0) for _ in range(option.num_devices)]
                view = on(view, *map(str, taken), layout=option.layout)
        jobs.append(view)
    changes: dict[str, Any] = {}
    if rng.random() < 0.3:
        changes["draining"] = frozenset({cluster.nodes[int(rng.integers(nodes))].name})
    if rng.random() < 0.3:
        idle = [device for left in free.values() for device in left]
        changes["down"] = frozenset(idle[:2])
    return snapshot(cluster, *jobs, **changes)
