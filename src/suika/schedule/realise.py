"""From device counts to devices: targets in order are stood on the topology, with as little disturbance as can be.

A policy says how many devices each job should have (`Target`), first come first placed. A job that should keep what
it has stays if its devices are still there. Another is placed on the nodes from which the fewest devices of jobs that
come later must be taken, its own nodes first, then the tightest fit; at its target size, else at the next smaller one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from suika.core.cluster import Device
from suika.core.decision import Action, Decision, Reason, ReasonCode
from suika.core.layout import Layout
from suika.core.snapshot import JobView, Option
from suika.plan.mapping import choose_nodes, map_ranks
from suika.schedule.board import FREE, OUT, Board
from suika.schedule.menu import menu_of
from suika.schedule.waiting import same_cut

KEEP = -1  # as `num_devices`: what the job has


class Target(NamedTuple):
    """What a policy wants for the job with this number on the board."""

    job: int
    num_devices: int


def realise(
    board: Board,
    targets: Iterable[Target],
    pinned: np.ndarray | None = None,
    *,
    rigid: bool = False,
    any_shape: bool = False,
) -> list[Decision]:
    """Decisions that bring `targets` about, in order.

    `pinned` [J]: running jobs that keep their devices whatever happens (jobs with a move in flight always do). Running
    jobs that are neither pinned nor a target give up their devices. `rigid`: the target size, in a shape that is about
    as fast as the best of that size, or nothing. `any_shape`: slower shapes will do as well.
    """
    return stand(board, targets, pinned, rigid=rigid, any_shape=any_shape).decisions()


def stand(
    board: Board,
    targets: Iterable[Target],
    pinned: np.ndarray | None = None,
    *,
    rigid: bool = False,
    any_shape: bool = False,
) -> Floor:
    """The floor once all targets are placed that can be; see `realise`."""
    floor = Floor(board, list(targets), pinned)
    waiting, staying = [], []
    for target in floor.targets:
        if target.num_devices == KEEP and floor.intact[target.job]:
            staying.append(target.job)
            continue
        floor.stay(staying)
        staying = []
        if not floor.place(target, rigid=rigid, any_shape=any_shape):
            waiting.append(target)
    floor.stay(staying)
    for target in waiting:
        floor.place_at_all(target, rigid=rigid, any_shape=any_shape)
    return floor


def option_on(board: Board, job: JobView, devices: Sequence[Device]) -> tuple[Layout, tuple[Device, ...]] | None:
    """The fastest option of `job` with exactly the shape of `devices`, and those in rank order; None without one."""
    positions = [board.fabric.position[device] for device in devices]
    shape = tuple(sorted((int(n) for n in np.bincount(board.fabric.node_of[positions]) if n), reverse=True))
    fitting = [o for o in menu_of(board.fabric, job).all_of.get(len(devices), ()) if o.shape == shape]
    if not fitting:
        return None
    layout = fitting[0].layout
    return layout, tuple(board.fabric.devices[p] for p in map_ranks(layout, positions, board.fabric))


class Floor:
    """Who stands where while targets are being placed. Mutable, private to one decision.

    `available` [N]: devices not held by anyone placed; `occupied` [N]: of those, held by targets that are yet to be
    placed and would like to stay.
    """

    def __init__(self, board: Board, targets: list[Target], pinned: np.ndarray | None) -> None:
        self.board = board
        num_jobs = len(board.jobs)
        fixed = board.locked & board.running
        if pinned is not None:
            fixed |= pinned & board.running & ~board.evicted
        wanted = np.zeros(num_jobs, dtype=bool)
        wanted[[target.job for target in targets]] = True
        firm = board.firm  # who may not be stopped finds a place first, or stays
        fixed |= firm & ~wanted & ~board.evicted
        self.placed = fixed.copy()  # [J]
        self.targets = [target for target in targets if not fixed[target.job]]
        if firm.any():
            self.targets.sort(key=lambda target: not firm[target.job])
        wanted &= ~fixed
        self.intact = wanted & board.running & ~board.evicted  # [J] could stay: nobody has taken its devices
        self.stopped = board.running & ~fixed & ~wanted
        self.given: dict[int, tuple[Option, list[int]]] = {}
        # Whoever may not stay lets go at once.
        lets_go = np.zeros(num_jobs + 3, dtype=bool)
        lets_go[:num_jobs] = board.running & ~fixed & ~self.intact
        self.holder = board.holder.copy()  # [D]
        going = lets_go[self.holder]
        self.holder[going] = np.where(board.must_leave[going] | board.slow[going], OUT, FREE)
        node_of, num_nodes = board.fabric.node_of, board.fabric.num_nodes
        standing = np.zeros(num_jobs + 3, dtype=bool)
        standing[:num_jobs] = self.intact
        self.occupied = np.bincount(node_of[standing[self.holder]], minlength=num_nodes).astype(np.int64)
        free = np.bincount(node_of[self.holder == FREE], minlength=num_nodes).astype(np.int64)
        self.available = free + self.occupied

    def stay(self, numbers: list[int]) -> None:
        """Intact jobs keep what they have."""
        if not numbers:
            return
        nodes = self.board.fabric.node_of[np.concatenate([self.board.positions[number] for number in numbers])]
        np.subtract.at(self.occupied, nodes, 1)
        np.subtract.at(self.available, nodes, 1)
        self.intact[numbers], self.placed[numbers] = False, True

    def place(self, target: Target, *, rigid: bool, any_shape: bool = False) -> bool:
        """Place a target at its size or below (`rigid`: only at its size), evicting jobs that come later; False if that
        cannot be."""
        number, num = target
        if num == KEEP and self.intact[number]:
            self.stay([number])
            return True
        menu = menu_of(self.board.fabric, self.board.jobs[number])
        wanted = len(self.board.positions[number]) if num == KEEP else num
        sizes = [wanted] if rigid else [size for size in reversed(menu.nums) if size <= wanted]
        for size in sizes:
            options = (menu.all_of if any_shape else menu.near_best).get(size, ())
            if self._place_one_of(number, options, self.available, self.occupied):
                return True
        return False

    def place_as(self, number: int, options: Sequence[Option]) -> bool:
        """Place a job as one of `options`, all of one size, on its own nodes if they can hold it, evicting jobs that
        come later; False if that cannot be."""
        if self.intact[number]:
            own = self.board.nodes_of(self.board.positions[number]) > 0
            if self._place_one_of(number, options, np.where(own, self.available, 0), np.where(own, self.occupied, 0)):
                return True
        return self._place_one_of(number, options, self.available, self.occupied)

    def place_at_all(self, target: Target, *, rigid: bool, any_shape: bool = False) -> bool:
        """Second chance without evicting anyone: in place, else the smallest option that fits (`rigid`: its size)."""
        number, num = target
        if self.intact[number]:
            self.stay([number])
            return True
        menu = menu_of(self.board.fabric, self.board.jobs[number])
        unheld = self.available - self.occupied
        none = np.zeros_like(unheld)
        wanted = len(self.board.positions[number]) if num == KEEP else num
        sizes: Sequence[int] = [wanted] if rigid else menu.nums
        shapes = menu.near_best if rigid and not any_shape else menu.all_of
        return any(self._place_one_of(number, shapes.get(size, ()), unheld, none) for size in sizes)

    def _place_one_of(
        self, number: int, options: Sequence[Option], available: np.ndarray, occupied: np.ndarray
    ) -> bool:
        """Place on the shape that takes the fewest devices from others; at a tie on the fastest."""
        own = self.board.nodes_of(self.board.positions[number]) if self.board.running[number] else None
        mine = own if own is not None and self.intact[number] else 0
        best: tuple[int, Option, tuple[int, ...]] | None = None
        for option in options:
            if sum(option.shape) > int(available.sum()):
                continue
            for usable in self._areas(available, option):
                found = choose_nodes(option.shape, usable, np.minimum(occupied - mine, usable), own)
                if found is not None and (best is None or found[1] < best[0]):
                    best = (found[1], option, found[0])
            if best is not None and best[0] == 0:
                break
        if best is None:
            return False
        self._stand(number, best[1], best[2])
        return True

    def _areas(self, available: np.ndarray, option: Option) -> list[np.ndarray]:
        """What is available [N] on nodes of the option's type; on each type by itself where any will do."""
        fabric = self.board.fabric
        if len(fabric.types) == 1 and option.device_type in ("", *fabric.types):
            return [available]
        kinds = [option.device_type] if option.device_type else fabric.types
        return [np.where(fabric.has_type(kind), available, 0) for kind in kinds]

    def _let_go(self, number: int) -> None:
        """Its devices are anyone's now; it will have to be placed elsewhere, or wait."""
        positions = self.board.positions[number]
        self.holder[positions] = FREE
        np.subtract.at(self.occupied, self.board.fabric.node_of[positions], 1)
        self.intact[number] = False

    def _stand(self, number: int, option: Option, nodes: Sequence[int]) -> None:
        before = set(self.board.positions[number].tolist())
        slow = {self.board.fabric.position[device] for device in self.board.snapshot.slow}
        if self.intact[number]:
            self._let_go(number)
        fabric, taken = self.board.fabric, []
        for node, part in zip(nodes, option.shape, strict=True):
            first = int(fabric.first[node])
            here = range(first, first + int(fabric.size[node]))
            holders = self.holder[first : first + int(fabric.size[node])].tolist()
            ranked = sorted(
                (holder >= 0, position in slow, position not in before, position)
                for position, holder in zip(here, holders, strict=True)
                if holder == FREE or (holder >= 0 and not self.placed[holder])
            )
            taken += [ranks[-1] for ranks in ranked[:part]]
            self.available[node] -= part
        for victim in {int(h) for h in self.holder[taken] if h >= 0}:
            self._let_go(victim)
        self.holder[taken] = number
        self.placed[number] = True
        self.given[number] = (option, taken)

    # -- what it comes to ----------------------------------------------------------------------------------------

    def moved(self) -> dict[int, Option]:
        """Options of the jobs that get something else than they have, by job number."""
        return {
            number: option for number, (option, taken) in self.given.items() if not self._same(number, option, taken)
        }

    def _same(self, number: int, option: Option, positions: list[int]) -> bool:
        had, layout = self.board.positions[number], self.board.jobs[number].layout
        return layout is not None and set(positions) == set(had.tolist()) and same_cut(layout, option.layout)

    def decisions(self) -> list[Decision]:
        made = [self._stop(int(number)) for number in np.flatnonzero(self.stopped)]
        for target in self.targets:
            number = target.job
            if number in self.given:
                decision = self._give(number, *self.given[number])
                if decision is not None:
                    made.append(decision)
            elif not self.placed[number] and self.board.running[number]:
                made.append(self._stop(number))
        return made

    def _stop(self, number: int) -> Decision:
        job = self.board.jobs[number]
        if self.board.evicted[number]:
            reason = Reason(ReasonCode.DRAIN, "its devices are going away and no others are free")
        else:
            reason = Reason(ReasonCode.PREEMPT, f"its {len(job.devices)} devices are of more use to others now")
        return Decision(job.id, Action.PREEMPT, reason)

    def _give(self, number: int, option: Option, positions: list[int]) -> Decision | None:
        board = self.board
        job = board.jobs[number]
        if self._same(number, option, positions):
            return None
        same_devices = set(positions) == set(board.positions[number].tolist())
        ranks = map_ranks(option.layout, positions, board.fabric)
        devices = tuple(board.fabric.devices[p] for p in ranks)
        reason = _reason(job, option, same_devices=same_devices, evicted=bool(board.evicted[number]))
        return Decision(job.id, Action.REDEPLOY if job.running else Action.START, reason, option.layout, devices)


def _reason(job: JobView, option: Option, *, same_devices: bool, evicted: bool) -> Reason:
    old, new = len(job.devices), option.num_devices
    if not old:
        return Reason(ReasonCode.START, f"{new} devices as {option.layout}")
    if evicted:
        return Reason(ReasonCode.DRAIN, f"moves off devices that are going away, to {new} as {option.layout}")
    if new > old:
        return Reason(
            ReasonCode.GROW, f"{old} -> {new} devices as {option.layout}: saves more time than the move costs"
        )
    if new < old:
        return Reason(
            ReasonCode.SHRINK, f"{old} -> {new} devices as {option.layout}: others finish sooner with the rest"
        )
    if same_devices:
        return Reason(ReasonCode.RELAYOUT, f"{job.layout} -> {option.layout} on the same {new} devices")
    return Reason(ReasonCode.MIGRATE, f"other {new} devices as {option.layout}")
