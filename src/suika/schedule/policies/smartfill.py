"""SmartFill (arXiv 2509.01811): optimal shares for any concave speedup, by a constant ratio of derivatives.

For jobs of one speedup function s, all present, divisible devices and free moves, the optimal policy keeps
s'(share_i) / s'(share_j) constant for as long as both are there (ratios c), and the least sum of completion times is
linear in the remaining sizes (a_i per unit of work). Both follow one job at a time, from the largest on: the newest
(smallest) job k takes the share mu that minimises (k - sum_i<k a_i s(share_i)) / s(mu), the others water-fill what is
left by their c. Adapted: s is the mean normalised hull of the jobs present, made smooth as a power law by pieces; of
more than `most` jobs only the smallest take part; shares are rounded as in heSRPT.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from suika.core.decision import Decision
from suika.core.snapshot import Snapshot
from suika.schedule.board import board_of
from suika.schedule.menu import Menu
from suika.schedule.policies.hesrpt import fill_shares
from suika.schedule.policies.order import by, facts, give, grow, open_devices
from suika.schedule.policies.srpt import time_saved_s

GRID = 48  # points at which s is known, and candidates for mu


@dataclass(frozen=True)
class Policy:
    name: str = "smartfill"
    round_s: float = 0.0
    most: int = 24
    repay: float = 4.0

    def decide(self, snapshot: Snapshot) -> list[Decision]:
        board = board_of(snapshot)
        known, free = facts(board), open_devices(board)
        order = by(known, lambda f: f.steps / f.menu.reference_rate + (0.0 if f.held else f.pause_s))
        taking_part = order[: self.most]
        shares = smart_shares([fact.menu for fact in taking_part], free)
        sizes = fill_shares(taking_part, shares, free, self.repay)
        left = free - sum(sizes.values())
        for fact in order[self.most :]:
            if fact.menu.nums[0] <= left:
                sizes[fact.number] = fact.menu.nums[0]
                left -= fact.menu.nums[0]
        grow(known, sizes, left, time_saved_s)
        return give(board, order, sizes)


def smart_shares(menus: list[Menu], capacity: int) -> list[float]:
    """Parts of `capacity` for jobs of these menus, smallest job first."""
    num = len(menus)
    if num <= 1 or capacity < 1:
        return [1.0] * num
    devices = np.geomspace(0.05, capacity, GRID)
    speed = np.mean([_speedup(menu, devices) for menu in menus], axis=0)
    log_devices = np.log(devices)
    slope = np.gradient(np.log(speed), log_devices)
    derivative = np.minimum.accumulate(speed / devices * np.clip(slope, 1e-3, 1.0))  # falls: s is concave
    log_derivative = np.log(derivative)

    def speed_at(share: np.ndarray) -> np.ndarray:
        return np.where(share > 0, np.interp(np.log(np.maximum(share, 1e-12)), log_devices, speed), 0.0)

    def shares_at(level: np.ndarray, ratio: np.ndarray) -> np.ndarray:
        """[levels, jobs] shares at which s' = level x ratio; none where s' never is as large."""
        wanted = np.log(level[:, None] * ratio[None, :])
        found = np.exp(np.interp(-wanted, -log_derivative, log_devices))
        return np.where(wanted > log_derivative[0], 0.0, found)

    levels = np.geomspace(derivative[-1] * 1e-4, derivative[0] * 1e4, 160)
    ratio, value = np.ones(1), np.array([1.0 / speed[-1]])  # the largest job, alone
    shares = np.array([float(capacity)])
    for k in range(2, num + 1):
        mine = devices[:-1]
        filled = shares_at(levels, ratio)  # [levels, k - 1]
        total = filled.sum(axis=1)
        # For each mu, the level at which the others use exactly what it leaves (total falls with the level).
        level = np.exp(np.interp(-(capacity - mine), -total, np.log(levels)))
        others = shares_at(level, ratio)  # [mu, k - 1]
        worth = (k - (speed_at(others) * value).sum(axis=1)) / speed_at(mine)
        best = int(np.where(worth > 0, worth, np.inf).argmin())
        shares = np.append(others[best], mine[best])
        at = np.interp(np.log(np.maximum(shares[-2:], devices[0])), log_devices, derivative)
        ratio = np.append(ratio, ratio[-1] * at[1] / max(at[0], 1e-30))
        value = np.append(value, worth[best])
    return [float(share) for share in (shares / max(shares.sum(), 1e-9))[::-1]]


def _speedup(menu: Menu, devices: np.ndarray) -> np.ndarray:
    """The hull as speedup over its smallest size, linear below it and flat beyond its end."""
    nums, rates = menu.hull
    return np.interp(devices, np.concatenate([[0], nums]), np.concatenate([[0.0], rates / rates[0] * nums[0]]))
