"""Why a job has what it has, or waits, and what would change it: the same words for a live and a simulated cluster.

What would change it is tried out, not guessed: the same policy decides about the same snapshot with one thing altered.
No other job is named: whoever may see one job need not see the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from suika.core.cluster import Device, Node
from suika.core.decision import Decision
from suika.core.errors import NotFoundError
from suika.core.layout import Layout
from suika.core.policy import Policy
from suika.core.quota import Quota
from suika.core.snapshot import JobView, Move, MoveCost, Snapshot
from suika.core.words import seconds
from suika.schedule.board import board_of
from suika.schedule.cycle import run_cycle
from suika.schedule.menu import menu_of


def explain(snapshot: Snapshot, policy: Policy, job_id: str) -> dict[str, Any]:
    """What a job could have, and what would give it something else than it has.

    `options`: what it could run as, with the time to its end there, its move included, and whether it has it now;
    `would_change`: alterations with an effect, and what it is; `without_effect`: those without; `waits_for`: when
    enough devices come free by predicted ends. Raises `NotFoundError` for a job that is not in the snapshot.
    """
    job = snapshot.job_of.get(job_id)
    if job is None:
        raise NotFoundError("job", job_id, "is not in the cluster at that time")
    would_change, without_effect = _tried_out(snapshot, policy, job)
    return {
        "options": list(_options(snapshot, job)),
        "waits_for": _waits_for(snapshot, job),
        "would_change": would_change,
        "without_effect": without_effect,
    }


def _options(snapshot: Snapshot, job: JobView) -> Iterator[dict[str, Any]]:
    """The best option of each size, smallest first."""
    menu = menu_of(board_of(snapshot).fabric, job)
    left, pause_s = job.remaining_at(snapshot.now_s), snapshot.move_cost.typical(job)
    for num in menu.nums:
        option, has = menu.best[num], num == len(job.devices)
        step_s = job.step_s if has and job.step_s is not None else option.step_s
        yield {
            "devices": num,
            "shape": list(option.shape),
            "device_type": option.device_type,
            "layout": (job.layout if has and job.layout is not None else option.layout).to_dict(),
            "step_s": step_s,
            "ends_in_s": left * step_s + (0.0 if has else pause_s),
            "has": has,
        }


def _waits_for(snapshot: Snapshot, job: JobView) -> dict[str, Any] | None:
    """For a job that waits: when predicted ends leave as many devices as its smallest option needs."""
    board = board_of(snapshot)
    menu = menu_of(board.fabric, job)
    if job.running or not menu:
        return None
    free, need = len(snapshot.free) + len(snapshot.promised), menu.nums[0]
    ends = sorted((_ends_in_s(snapshot, other), len(other.devices)) for other in snapshot.jobs if other.running)
    for in_s, devices in [(0.0, 0), *ends]:
        free += devices
        if free >= need:
            return {"devices": need, "free_now": len(snapshot.free), "in_s": in_s}
    return {"devices": need, "free_now": len(snapshot.free), "in_s": None}


def _ends_in_s(snapshot: Snapshot, job: JobView) -> float:
    pausing_s = max((job.moving_until_s or 0.0) - snapshot.now_s, 0.0)
    return pausing_s + job.remaining_at(snapshot.now_s) * (job.step_s or 0.0)


# -- what would change it -------------------------------------------------------------------------------------------


def _tried_out(snapshot: Snapshot, policy: Policy, job: JobView) -> tuple[list[dict[str, str]], list[str]]:
    """Alterations with an effect, and what it is; and those without."""
    if job.locked_at(snapshot.now_s):
        if job.moving_until_s is None:
            return [], []
        then = f"it can be decided about again in {seconds(job.moving_until_s - snapshot.now_s)}"
        return [{"change": "the end of its move", "then": then}], []
    as_is = _outcome(snapshot, policy, job)
    would_change, without_effect = [], []
    for change, altered in _alterations(snapshot, job):
        then = _outcome(altered, policy, altered.job_of[job.id])
        if then == as_is:
            without_effect.append(change)
        else:
            would_change.append({"change": change, "then": then})
    return would_change, without_effect


def _alterations(snapshot: Snapshot, job: JobView) -> Iterator[tuple[str, Snapshot]]:
    """One thing altered at a time, from what its user can do to what the cluster's owner can."""
    others = [other for other in snapshot.jobs if other is not job]
    highest = max((other.priority for other in others), default=job.priority)
    if highest >= job.priority:
        yield f"priority {highest + 1} instead of {job.priority}", _with(snapshot, job, priority=highest + 1)
    sizes = sorted({option.num_devices for option in job.curve.options})
    smaller, larger = [n for n in sizes if n < job.min_devices], [n for n in sizes if n > job.max_devices]
    for low in dict.fromkeys((*smaller[-1:], *smaller[:1])):
        yield f"a range from {low} instead of {job.min_devices} devices on", _with(snapshot, job, min_devices=low)
    for high in dict.fromkeys((*larger[:1], *larger[-1:])):
        yield f"a range up to {high} instead of {job.max_devices} devices", _with(snapshot, job, max_devices=high)
    if job.fixed_layout is not None:
        yield f"any layout instead of {job.fixed_layout}", _with(snapshot, job, fixed_layout=None)
    yield from _of_the_cluster(snapshot, job)


def _of_the_cluster(snapshot: Snapshot, job: JobView) -> Iterator[tuple[str, Snapshot]]:
    quota = snapshot.quotas.get(job.tenant, Quota())
    quotas = snapshot.quotas
    if quota.max is not None:
        change = f"no maximum for tenant {job.tenant} instead of {quota.max} devices"
        yield change, replace(snapshot, quotas={**quotas, job.tenant: replace(quota, max=None)})
    if quotas and not job.running:
        sure = quota.guarantee + job.min_devices
        if quota.max is None or sure <= quota.max:
            change = f"a guarantee of {sure} devices for tenant {job.tenant}"
            yield change, replace(snapshot, quotas={**quotas, job.tenant: Quota(guarantee=sure, max=quota.max)})
    if any(quota.guarantees for tenant, quota in quotas.items() if tenant != job.tenant):
        yield "no guarantees for other tenants", replace(snapshot, quotas={job.tenant: quota})
    if snapshot.down or snapshot.draining or snapshot.slow:
        yield "all devices up, sound and not draining", _all_up(snapshot)
    yield "one more node", _one_more_node(snapshot)
    running = [other for other in snapshot.jobs if other.running and other is not job]
    ahead = [other for other in running if not other.locked_at(snapshot.now_s)]
    if ahead:
        first = min(ahead, key=lambda other: (_ends_in_s(snapshot, other), other.id))
        change = f"the next end of a job, on {len(first.devices)} devices in {seconds(_ends_in_s(snapshot, first))}"
        yield change, replace(snapshot, jobs=tuple(other for other in snapshot.jobs if other is not first))


def _all_up(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, down=frozenset(), draining=frozenset(), slow={})


def _with(snapshot: Snapshot, job: JobView, **changes: Any) -> Snapshot:
    altered = replace(job, **changes)
    return replace(snapshot, jobs=tuple(altered if other is job else other for other in snapshot.jobs))


def _one_more_node(snapshot: Snapshot) -> Snapshot:
    """The cluster with one more node like its last, which is empty."""
    cluster = snapshot.cluster
    last = cluster.nodes[-1]
    name = next(f"more{i}" for i in range(len(cluster.nodes) + 1) if f"more{i}" not in cluster.node_of)
    node = Node(name, last.num_devices, last.device_type, last.domain_size, last.rack, last.pod)
    larger = replace(cluster, nodes=(*cluster.nodes, node))
    return replace(snapshot, cluster=larger, move_cost=_Typical(snapshot.move_cost))


@dataclass(frozen=True)
class _Typical:
    """Moves in a cluster that there is not: the predictor knows no links of it."""

    known: MoveCost

    def __call__(self, job: JobView, layout: Layout | None, devices: tuple[Device, ...]) -> Move:
        pause_s = self.known.typical(job)
        return Move(pause_s, pause_s)

    def place(self, job: JobView, layout: Layout, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return devices

    def typical(self, job: JobView) -> float:
        return self.known.typical(job)


def _outcome(snapshot: Snapshot, policy: Policy, job: JobView) -> str:
    """What the policy would give the job now, in words."""
    result = run_cycle(snapshot, policy)
    decision = next((step.decision for step in result.steps if step.decision.job_id == job.id), None)
    if decision is None:
        return _holds("it keeps", job.layout, len(job.devices)) if job.running else "it waits"
    return _gets(job, decision)


def _gets(job: JobView, decision: Decision) -> str:
    if not decision.devices:
        return "it stops"
    verb = "it moves to" if job.running else "it starts on"
    return _holds(verb, decision.layout, len(decision.devices))


def _holds(verb: str, layout: Layout | None, num: int) -> str:
    return f"{verb} {num} devices" + (f" as {layout}" if layout is not None else "")
