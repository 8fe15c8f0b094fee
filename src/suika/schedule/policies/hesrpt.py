"""heSRPT (Berg, Vesilo and Harchol-Balter, 2020): water-filling for jobs with speedup k^p.

With m jobs of known sizes, largest first, job i gets the share (i/m)^(1/(1-p)) - ((i-1)/m)^(1/(1-p)) of all devices:
optimal for the mean completion time if all jobs are present, devices are divisible and moves are free. Adapted: p is
0.8, or fitted to each hull (log-log slope) and averaged (`power=0`: 3 % worse on the development traces); shares are
rounded down to feasible sizes; what remains is spent by time saved per device; a running job changes only if that saves
more than `repay` times its pause.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.menu import Menu
from suika.schedule.policies.order import Fact, by, facts, give, grow, open_devices
from suika.schedule.policies.srpt import time_saved_s


@dataclass(frozen=True)
class Policy:
    """`power`: the speedup's exponent; 0: fitted to the jobs present."""

    name: str = "hesrpt"
    round_s: float = 0.0
    power: float = 0.8
    repay: float = 1.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        # Smallest first; the formula counts from the largest.
        order = by(known, lambda f: f.steps / f.menu.reference_rate + (0.0 if f.held else f.pause_s))
        power = self.power or float(np.mean([exponent(fact.menu) for fact in known] or [0.5]))
        sizes = fill_shares(order, heshares(len(order), power), free, self.repay)
        grow(known, sizes, free - sum(sizes.values()), time_saved_s)
        return give(board, order, sizes)


def heshares(num: int, power: float) -> list[float]:
    """Shares of `num` jobs, smallest job first."""
    edges = (np.arange(num + 1) / max(num, 1)) ** (1.0 / (1.0 - power))
    return [float(share) for share in np.diff(edges)[::-1]]


def exponent(menu: Menu) -> float:
    """p of the speedup k^p that fits the hull best in log-log, kept within (0, 1)."""
    devices, rates = menu.hull
    if len(devices) < 2:
        return 0.5
    slope = np.polyfit(np.log(devices), np.log(rates), 1)[0]
    return float(np.clip(slope, 0.05, 0.95))


def fill_shares(order: list[Fact], shares: list[float], free: int, repay: float) -> dict[int, int]:
    """Feasible sizes nearest below the shares, in order; a share below a job's smallest size passes on to the next."""
    capacity, carried = free, 0.0
    sizes: dict[int, int] = {}
    for fact, share in zip(order, shares, strict=True):
        budget = share * capacity + carried
        size = max((num for num in fact.menu.hull[0].tolist() if num <= min(budget + 1e-9, free)), default=0)
        if not size and fact.menu.nums[0] <= min(free, budget + fact.menu.nums[0] / 2):
            size = fact.menu.nums[0]
        if size and 0 < fact.held <= free and not fact.leaves:
            change_s = fact.time_s(fact.held) - fact.steps / fact.menu.rate(size)
            if 0 <= change_s <= repay * fact.pause_s:
                size = fact.held
        carried = budget - size
        if size:
            sizes[fact.number] = size
            free -= size
    return sizes
