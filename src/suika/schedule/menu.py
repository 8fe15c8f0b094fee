"""`Menu`: what one job may be given on one fabric: its feasible options by size, and their concave hull.

K hull points. Rates are steps per second.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import cached_property

import numpy as np

from suika.core.layout import Layout
from suika.core.snapshot import JobView, Option, ScalingCurve
from suika.plan.ordering import Fabric
from suika.schedule.waiting import feasible_options

REFERENCE_DEVICES = 16  # jobs are compared at their rate on (up to) this many devices
WORTH_FILLING = 1.1  # sizes off the hull: only those that gain 10 % on every smaller one
SMALLEST_GAIN = 1.01  # hull points that gain less than 1 % are not worth their devices
NEAR_BEST = 1.10  # shapes within 10 % of the best of their size are as good as it, if they are easier to place


class Menu:
    """Feasible options of one job. Empty if nothing in the cluster could ever run it."""

    def __init__(self, options: tuple[Option, ...]) -> None:
        self.options = options
        by_num: dict[int, list[Option]] = {}
        for option in sorted(options, key=lambda o: (o.num_devices, o.step_s, len(o.shape), o.shape, o.device_type)):
            by_num.setdefault(option.num_devices, []).append(option)
        self.nums = tuple(by_num)  # ascending
        self.best = {num: rows[0] for num, rows in by_num.items()}
        self.near_best = {
            num: tuple(o for o in rows if o.step_s <= NEAR_BEST * rows[0].step_s) for num, rows in by_num.items()
        }
        self.all_of = {num: tuple(rows) for num, rows in by_num.items()}

    def __bool__(self) -> bool:
        return bool(self.options)

    @cached_property
    def hull(self) -> tuple[np.ndarray, np.ndarray]:
        """(devices [K], rate [K]): the upper concave hull of the best rate per size, from the smallest size on."""
        points: list[tuple[int, float]] = []
        for num in self.nums:
            rate = self.best[num].steps_per_s
            if points and rate < points[-1][1] * SMALLEST_GAIN:
                continue
            while len(points) >= 2 and _slope(points[-2], points[-1]) <= _slope(points[-1], (num, rate)):
                points.pop()
            points.append((num, rate))
        kept = points[:1]
        for point in points[1:]:
            if point[1] >= kept[-1][1] * SMALLEST_GAIN:
                kept.append(point)
        return np.array([p[0] for p in kept], dtype=np.int64), np.array([p[1] for p in kept])

    @cached_property
    def between(self) -> tuple[np.ndarray, np.ndarray]:
        """(devices [E], rate [E]): sizes between hull points, worth having where the next point does not fit."""
        on_hull = set(self.hull[0].tolist())
        points: list[tuple[int, float]] = []
        fastest = 0.0
        for num in self.nums:
            rate = self.rate(num)
            if num in on_hull:
                fastest = max(rate, fastest)
            elif rate >= fastest * WORTH_FILLING:
                points.append((num, rate))
                fastest = rate
        return np.array([p[0] for p in points], dtype=np.int64), np.array([p[1] for p in points])

    @cached_property
    def reference_rate(self) -> float:
        nums, rates = self.hull
        small = nums <= REFERENCE_DEVICES
        return float(rates[small][-1] if small.any() else rates[0])

    @cached_property
    def max_rate(self) -> float:
        return float(self.hull[1].max())

    @cached_property
    def least_work(self) -> float:
        """Fewest device-seconds in which a step can be done."""
        return min(option.num_devices * option.step_s for option in self.options)

    def size_for(self, wanted: int) -> int:
        """The largest feasible size <= `wanted`, else the smallest there is."""
        return max((num for num in self.nums if num <= wanted), default=self.nums[0])

    def rate(self, num: int) -> float:
        return self.best[num].steps_per_s


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


Key = tuple[int, int, int, int, Layout | None]
_menus: OrderedDict[Key, tuple[Fabric, ScalingCurve, Menu]] = OrderedDict()


def menu_of(fabric: Fabric, job: JobView) -> Menu:
    """The menu of `job`, remembered per (fabric, curve, range, fixed layout); objects are compared by identity."""
    key = (id(fabric), id(job.curve), job.min_devices, job.max_devices, job.fixed_layout)
    found = _menus.get(key)
    if found is not None and found[0] is fabric and found[1] is job.curve:
        return found[2]
    menu = Menu(feasible_options(fabric, job))
    _menus[key] = (fabric, job.curve, menu)
    while len(_menus) > 50_000:
        _menus.popitem(last=False)
    return menu
