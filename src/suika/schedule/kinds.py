"""Several device types in one cluster: each job is planned on one type at a time, and here the type is chosen.

Jobs are taken by priority and least remaining time; each goes to the type on which it would end first, by a fluid rule:
not before all work sent there ahead of it is done at its best efficiency on all devices, and not before the job could
end alone. A running job stays on its type unless another ends it sooner by more than twice the pause of the change.
The policy, which knows of one type only, is then asked about each type's nodes and jobs, fastest type first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from suika.core.cluster import Cluster
from suika.core.decision import Action, Decision
from suika.core.job import JobState
from suika.core.policy import Policy
from suika.core.snapshot import JobView, ScalingCurve, Snapshot
from suika.plan.ordering import fabric
from suika.schedule.menu import Menu, menu_of

ANY = ""  # as a job's type: whichever has devices for it

_clusters: OrderedDict[int, tuple[Cluster, dict[str, Cluster]]] = OrderedDict()
_curves: OrderedDict[tuple[int, str], tuple[ScalingCurve, ScalingCurve]] = OrderedDict()
_views: OrderedDict[tuple[int, str, bool], tuple[JobView, JobView]] = OrderedDict()


def decide(snapshot: Snapshot, policy: Policy) -> list[Decision]:
    """What `policy` decides, type by type where the cluster has several."""
    parts = _parts(snapshot.cluster)
    if len(parts) < 2:
        return policy.decide(snapshot)
    homes = _homes(snapshot, parts)
    made: dict[str, Decision] = {}
    told: dict[str, Decision] = {}
    moved: set[str] = set()
    for kind in _fastest_first(snapshot, parts):
        for decision in policy.decide(_part(snapshot, parts[kind], kind, homes, moved)):
            job = snapshot.job_of[decision.job_id]
            if decision.action is Action.WAIT:
                told[job.id] = decision
                continue
            comes = job.running and snapshot.cluster.node_of[job.devices[0].node].device_type != kind
            if comes and decision.devices:
                moved.add(job.id)
                decision = replace(decision, action=Action.REDEPLOY)
            if not comes or decision.devices:
                made[job.id] = decision
        # Who found nothing on its type may run on a slower one meanwhile.
        homes |= {
            job.id: ANY for job in snapshot.jobs if homes.get(job.id) == kind and not (job.running or job.id in made)
        }
    return [*made.values(), *(decision for job_id, decision in told.items() if job_id not in made)]


def _parts(cluster: Cluster) -> dict[str, Cluster]:
    """A cluster per device type; the same objects for the same cluster."""
    found = _clusters.get(id(cluster))
    if found is None or found[0] is not cluster:
        types = dict.fromkeys(node.device_type for node in cluster.nodes)
        parts = {
            kind: replace(cluster, nodes=tuple(node for node in cluster.nodes if node.device_type == kind))
            for kind in types
        }
        found = _clusters[id(cluster)] = (cluster, parts)
        _forget(_clusters, 8)
    return found[1]


def _part(snapshot: Snapshot, cluster: Cluster, kind: str, homes: Mapping[str, str], moved: set[str]) -> Snapshot:
    """Nodes of one type, with the jobs that run there or are to: who runs elsewhere and is to come here waits here."""
    jobs = []
    for job in snapshot.jobs:
        here = job.running and job.devices[0].node in cluster.node_of
        if job.id not in moved and (here or homes.get(job.id) in (kind, ANY)):
            jobs.append(_view(job, kind, comes=job.running and not here))
    at = cluster.position
    return replace(
        snapshot,
        cluster=cluster,
        jobs=tuple(jobs),
        down=frozenset(device for device in snapshot.down if device in at),
        slow={device: times for device, times in snapshot.slow.items() if device in at},
        draining=frozenset(node for node in snapshot.draining if node in cluster.node_of),
        promised={device: at_s for device, at_s in snapshot.promised.items() if device in at},
    )


def _view(job: JobView, kind: str, *, comes: bool) -> JobView:
    """The job with its options on one type; the same object for the same view."""
    found = _views.get((id(job), kind, comes))
    if found is None or found[0] is not job:
        view = replace(job, curve=_curve(job.curve, kind))
        if comes:
            view = replace(view, state=JobState.QUEUED, devices=(), layout=None, observed_step_s=None, has_state=True)
        found = _views[id(job), kind, comes] = (job, view)
        _forget(_views, 100_000)
    return found[1]


def _curve(curve: ScalingCurve, kind: str) -> ScalingCurve:
    found = _curves.get((id(curve), kind))
    if found is None or found[0] is not curve:
        options = tuple(option for option in curve.options if option.device_type in ("", kind))
        found = _curves[id(curve), kind] = (curve, ScalingCurve(options, curve.version))
        _forget(_curves, 50_000)
    return found[1]


def _forget(cache: OrderedDict, most: int) -> None:
    while len(cache) > most:
        cache.popitem(last=False)


# -- which type ---------------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """One type's nodes: its devices in use for planning, and the seconds of work that were sent there."""

    num_devices: int
    queued_s: float = 0.0


def _homes(snapshot: Snapshot, parts: Mapping[str, Cluster]) -> dict[str, str]:
    """The type of each job, by job id; a job without an option anywhere has none."""
    lost = set(snapshot.down) | {d for node in snapshot.draining for d in snapshot.cluster.node_of[node].devices}
    pools = {kind: _Pool(sum(d not in lost for d in cluster.devices)) for kind, cluster in parts.items()}
    homes: dict[str, str] = {}
    for job, menus in sorted(_menus(snapshot, parts, pools), key=lambda entry: _claim(snapshot, *entry)):
        if menus:
            homes[job.id] = _home(snapshot, job, menus, pools)
    return homes


def _menus(
    snapshot: Snapshot, parts: Mapping[str, Cluster], pools: Mapping[str, _Pool]
) -> Iterator[tuple[JobView, dict[str, Menu]]]:
    """Each job with what it may be given on each type that has devices."""
    for job in snapshot.jobs:
        known = {kind: menu_of(fabric(parts[kind]), _view(job, kind, comes=False)) for kind in parts}
        yield job, {kind: menu for kind, menu in known.items() if menu and pools[kind].num_devices}


def _claim(snapshot: Snapshot, job: JobView, menus: Mapping[str, Menu]) -> tuple[object, ...]:
    rate = max((menu.reference_rate for menu in menus.values()), default=1.0)
    left_s = job.remaining_at(snapshot.now_s) / rate
    if not job.running:
        left_s += snapshot.move_cost.typical(job)
    return -job.priority, left_s / job.weight, job.submitted_s, job.id


def _home(snapshot: Snapshot, job: JobView, menus: Mapping[str, Menu], pools: Mapping[str, _Pool]) -> str:
    left, pause_s = job.remaining_at(snapshot.now_s), snapshot.move_cost.typical(job)
    here = snapshot.cluster.node_of[job.devices[0].node].device_type if job.running else None
    end_s = {}
    for kind, menu in menus.items():
        pool = pools[kind]
        queued_s = pool.queued_s + left * menu.least_work / pool.num_devices
        end_s[kind] = max(queued_s, left / menu.max_rate + (0.0 if kind == here else pause_s))
    best = min(end_s, key=lambda kind: (end_s[kind], kind))
    if here in end_s and (job.locked_at(snapshot.now_s) or end_s[here] - end_s[best] <= pause_s):
        best = here  # of two pauses one is in `end_s`
    pools[best].queued_s += left * menus[best].least_work / pools[best].num_devices
    return best


def _fastest_first(snapshot: Snapshot, parts: Mapping[str, Cluster]) -> list[str]:
    """Types by the best pace that any job has on them, as a share of the best that it has anywhere; then by name."""
    pace = dict.fromkeys(parts, 0.0)
    for job in snapshot.jobs:
        best = min((option.step_s for option in job.curve.options), default=0.0)
        for option in job.curve.options:
            if option.device_type in pace:
                pace[option.device_type] = max(pace[option.device_type], best / option.step_s)
    return sorted(parts, key=lambda kind: (-pace[kind], kind))
