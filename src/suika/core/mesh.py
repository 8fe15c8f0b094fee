"""`Mesh`: rank <-> (dp, pp, cp, tp) coordinate. The rank order is explicit, never implied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from suika.core.errors import require
from suika.core.layout import Layout

DEFAULT_ORDER = ("dp", "pp", "cp", "tp")


class Coordinate(NamedTuple):
    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Ranks of a layout as an array whose axes are `order`, outermost first: `arange(n).view(dp, pp, cp, tp)`.

    tp varies fastest, so that consecutive devices (one NVLink domain) hold one tensor-parallel group.
    """

    layout: Layout
    order: tuple[str, ...] = DEFAULT_ORDER

    def __post_init__(self) -> None:
        ok = sorted(self.order) == sorted(DEFAULT_ORDER)
        require(ok, "mesh.order", self.order, f"must name each of {DEFAULT_ORDER} once")

    @property
    def num_ranks(self) -> int:
        return self.layout.num_ranks

    def coordinate(self, rank: int) -> Coordinate:
        assert 0 <= rank < self.num_ranks, f"rank {rank} of {self.num_ranks}"
        place = {}
        for axis in reversed(self.order):
            rank, place[axis] = divmod(rank, getattr(self.layout, axis))
        return Coordinate(**place)

    def rank(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        place, rank = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}, 0
        for axis in self.order:
            rank = rank * getattr(self.layout, axis) + place[axis]
        return rank

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Ranks that hold the same shards as `rank`, itself included, in (dp, cp) order whatever the mesh's order."""
        here = self.coordinate(rank)
        return tuple(
            self.rank(dp=dp, cp=cp, pp=here.pp, tp=here.tp)
            for dp in range(self.layout.dp)
            for cp in range(self.layout.cp)
        )

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that share every coordinate of `rank` except those of `axes`, ascending."""
        here = self.coordinate(rank)
        fixed = [axis for axis in self.order if axis not in axes]
        return tuple(
            other
            for other in range(self.num_ranks)
            if all(getattr(self.coordinate(other), axis) == getattr(here, axis) for axis in fixed)
        )
