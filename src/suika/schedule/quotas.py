"""Tenants' quotas: what the policy may plan for each tenant, what a plan owes to owners, and what is only lent.

Policies know nothing of quotas. Before one is asked, jobs that no maximum leaves room for are hidden from it. Its plan
is then held against the guarantees: a tenant's jobs together hold what they ask for, up to the guarantee; who holds
more than that borrows, and what is borrowed goes back when an owner comes (`reclaim.py`).

Within a tenant, jobs count by priority, then those that run, then by least remaining time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from suika.core.quota import Quota
from suika.core.snapshot import JobView, Option, Snapshot
from suika.plan.ordering import Fabric
from suika.schedule.board import Board
from suika.schedule.menu import menu_of

Shape = tuple[int, ...]


def within_maxima(board: Board) -> Snapshot:
    """What the policy is shown: without waiting jobs that their tenant's maximum leaves no room for, and with jobs that
    may grow only as far as it allows."""
    snapshot = board.snapshot
    limited = {tenant: quota.max for tenant, quota in snapshot.quotas.items() if quota.max is not None}
    if not limited:
        return snapshot
    shown: dict[str, JobView | None] = {}
    for tenant, most in limited.items():
        left, least = most, {}
        for number in by_claim(board, (n for n, job in enumerate(board.jobs) if job.tenant == tenant)):
            job, menu = board.jobs[number], menu_of(board.fabric, board.jobs[number])
            least[job.id] = len(job.devices) if board.locked[number] or not menu else menu.nums[0]
            if not job.running and least[job.id] > left:
                shown[job.id] = None
            else:
                left -= least[job.id]
                shown[job.id] = job
        for job_id, view in shown.items():
            if view is not None and view.tenant == tenant:
                shown[job_id] = _narrowed(view, max(least[job_id] + max(left, 0), view.min_devices))
    jobs = (shown.get(job.id, job) for job in snapshot.jobs)
    return replace(snapshot, jobs=tuple(job for job in jobs if job is not None))


_narrow: OrderedDict[tuple[int, int], tuple[JobView, JobView]] = OrderedDict()


def _narrowed(job: JobView, most: int) -> JobView:
    """The job with at most `most` devices; the same object for the same view, so that derived state stays of use."""
    if most >= job.max_devices:
        return job
    found = _narrow.get((id(job), most))
    if found is None or found[0] is not job:
        found = _narrow[id(job), most] = (job, replace(job, max_devices=most))
        while len(_narrow) > 50_000:
            _narrow.popitem(last=False)
    return found[1]


def by_claim(board: Board, numbers: Iterable[int]) -> list[int]:
    """Jobs of one tenant in the order in which its quota is theirs. Jobs with a move in flight cannot give way."""
    return sorted(numbers, key=lambda number: _claim(board, number))


def _claim(board: Board, number: int) -> tuple[object, ...]:
    job, menu = board.jobs[number], menu_of(board.fabric, board.jobs[number])
    running = bool(board.running[number])
    left_s = job.remaining_at(board.snapshot.now_s) / (menu.reference_rate if menu else 1.0)
    if not running:
        left_s += board.snapshot.move_cost.typical(job)
    return not board.locked[number], -job.priority, not running, left_s / job.weight, number


# -- what a plan owes -----------------------------------------------------------------------------------------------


class Guarantee:
    """What one tenant is sure of, as cells that hold shapes: devices anywhere, or whole nodes."""

    def __init__(self, quota: Quota, fabric: Fabric) -> None:
        self.whole_nodes = quota.guarantee_nodes > 0
        self.devices = quota.guarantee
        self.cells: Sequence[int] = fabric.sizes_of("")[: quota.guarantee_nodes]

    def holds(self, shapes: Iterable[Shape]) -> bool:
        """Whether it covers all `shapes` at once; parts of one shape lie on different nodes (best fit)."""
        if not self.whole_nodes:
            return sum(map(sum, shapes)) <= self.devices
        left = list(self.cells)
        for shape in sorted(shapes, key=lambda s: (-max(s), -sum(s), s)):
            used: set[int] = set()
            for part in sorted(shape, reverse=True):
                fits = [cell for cell, free in enumerate(left) if free >= part and cell not in used]
                if not fits:
                    return False
                best = min(fits, key=lambda cell: (left[cell], cell))
                used.add(best)
                left[best] -= part
        return True


@dataclass
class Dues:
    """What a plan must still give: `sizes` [job number -> devices] that a maximum cuts it down to (0: nothing); `owed`
    [job number -> options, any of which does], in order; `sure` [job number -> devices] that nobody may take away;
    `displaced` [job number -> devices]: jobs that were to have what an owner keeps."""

    sizes: dict[int, int] = field(default_factory=dict)
    owed: dict[int, tuple[Option, ...]] = field(default_factory=dict)
    sure: dict[int, int] = field(default_factory=dict)
    displaced: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sizes or self.owed or self.displaced)


def dues(planned: Board, quotas: Mapping[str, Quota], changed: Container[str]) -> Dues:
    """What `planned`, a board on which every decision is carried out, owes to tenants; `changed`: whom it changes."""
    found = Dues()
    jobs_of: dict[str, list[int]] = {tenant: [] for tenant in quotas}
    for number, job in enumerate(planned.jobs):
        if job.tenant in jobs_of:
            jobs_of[job.tenant].append(number)
    for tenant, quota in quotas.items():
        claims = by_claim(planned, jobs_of[tenant])
        _trim(planned, claims, quota, found)
        if quota.guarantees:
            _cover(planned, claims, quota, found, changed)
    return found


def _trim(planned: Board, claims: Sequence[int], quota: Quota, found: Dues) -> None:
    """Cut a tenant's jobs down to its maximum, the last in the order of claims first."""
    if quota.max is None or sum(len(planned.positions[number]) for number in claims) <= quota.max:
        return
    left = quota.max
    for number in claims:
        holds = len(planned.positions[number])
        if holds > left and not planned.locked[number]:
            job = planned.jobs[number]
            size = max((num for num in menu_of(planned.fabric, job).nums if num <= left), default=0)
            if size or job.stoppable:
                found.sizes[number] = holds = size
        left = max(left - holds, 0)


def _cover(planned: Board, claims: Sequence[int], quota: Quota, found: Dues, changed: Container[str]) -> None:
    """What of a tenant's jobs is guaranteed where it stands, and what is still owed to it."""
    guarantee = Guarantee(quota, planned.fabric)
    runs = [number for number in claims if planned.running[number] and found.sizes.get(number, 1)]
    sure = _sure(planned, runs, guarantee, found)
    found.sure.update({number: sum(shape) for number, shape in sure.items()})
    # Whole nodes are judged by what stands in them; devices by all that the tenant holds.
    base = dict(sure) if guarantee.whole_nodes else {number: _shape(planned, number) for number in runs}
    room = float("inf") if quota.max is None else quota.max - sum(sum(_shape(planned, number)) for number in runs)
    open_ = [number for number in claims if not planned.locked[number] and number not in found.sizes]
    # Everybody who waits at the smallest size first; then all up to what they ask for.
    for asked, numbers in ((False, [n for n in open_ if not planned.running[n]]), (True, open_)):
        for number in numbers:
            others = {other: shape for other, shape in base.items() if other != number}
            had = found.owed[number][0].num_devices if number in found.owed else len(planned.positions[number])
            sizes = _sizes(planned, number, guarantee, others, asked=asked)
            fresh = planned.jobs[number].id in changed
            options = _wanted(planned, number, guarantee, others, [s for s in sizes if s - had <= room], fresh)
            if options:
                found.owed[number] = options
                room -= options[0].num_devices - had
                base[number] = options[0].shape


def _sure(planned: Board, runs: Sequence[int], guarantee: Guarantee, found: Dues) -> dict[int, Shape]:
    """The part of each running job that its tenant's guarantee covers: first everybody's smallest, then the rest."""
    sure: dict[int, Shape] = {}
    full = {number: _shape(planned, number) for number in runs if number not in found.sizes}
    if guarantee.holds(full.values()):
        return full
    for number in full:
        menu = menu_of(planned.fabric, planned.jobs[number])
        small = menu.best[menu.nums[0]].shape if menu else full[number]
        shape = full[number] if sum(small) >= sum(full[number]) else small
        if guarantee.holds([*sure.values(), shape]):
            sure[number] = shape
    for number in list(sure):
        larger = [full[number], *_shapes_between(planned, number, sum(sure[number]), sum(full[number]))]
        others = [shape for other, shape in sure.items() if other != number]
        sure[number] = next((shape for shape in larger if guarantee.holds([*others, shape])), sure[number])
    return sure


def _shapes_between(planned: Board, number: int, low: int, high: int) -> list[Shape]:
    menu = menu_of(planned.fabric, planned.jobs[number])
    return [menu.best[num].shape for num in reversed(menu.nums) if low < num < high]


def _sizes(planned: Board, number: int, guarantee: Guarantee, others: Mapping[int, Shape], *, asked: bool) -> list[int]:
    """Sizes that may be owed to a job, descending: its smallest, or more than it holds, up to what was asked for."""
    job, menu = planned.jobs[number], menu_of(planned.fabric, planned.jobs[number])
    if not menu:
        return []
    asks = menu.size_for(job.requested_devices or job.max_devices) if asked else menu.nums[0]
    held = len(planned.positions[number])
    # A gang that stands scattered while whole nodes are its tenant's may come together at the size that it has.
    scattered = guarantee.whole_nodes and held and not guarantee.holds([*others.values(), _shape(planned, number)])
    return [num for num in reversed(menu.nums) if (held if scattered else held + 1) <= num <= asks]


def _wanted(
    planned: Board,
    number: int,
    guarantee: Guarantee,
    others: Mapping[int, Shape],
    sizes: Sequence[int],
    fresh: bool,
) -> tuple[Option, ...]:
    """Options of the first of `sizes` that the guarantee covers beside `others`; none if none does or repays."""
    menu = menu_of(planned.fabric, planned.jobs[number])
    for size in sizes:
        fitting = tuple(o for o in menu.near_best[size] if guarantee.holds([*others.values(), o.shape]))
        if fitting and (not planned.running[number] or _repays(planned, number, fitting[0], fresh)):
            return fitting
    return ()


def _repays(planned: Board, number: int, option: Option, fresh: bool) -> bool:
    """A move of a job that could run on must repay its pause twice, as growth must; `fresh`: it pauses anyway."""
    job = planned.jobs[number]
    step_s = job.observed_step_s
    if step_s is None:
        shape = _shape(planned, number)
        step_s = next((o.step_s for o in job.curve.options if o.shape == shape and o.layout == job.layout), job.step_s)
    pause_s = 0.0 if fresh else planned.snapshot.move_cost.typical(job)
    saved_s = job.remaining_at(planned.snapshot.now_s) * ((step_s or option.step_s) - option.step_s)
    return saved_s > 2 * pause_s


def _shape(planned: Board, number: int) -> Shape:
    """Devices per node where the job stands, descending."""
    per_node = planned.nodes_of(planned.positions[number])
    return tuple(sorted((int(num) for num in per_node if num), reverse=True))
