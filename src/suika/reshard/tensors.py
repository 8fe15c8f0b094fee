"""Resharding for any program: named tensors, who holds which box before, who needs which box after.

    >>> plan = plan_reshard(
    ...     {"w": TensorSpec((6, 4), "float32")},
    ...     old=[{"w": box} for box in dtensor_boxes((6, 4), mesh=[2], placements=[0])],  # rows over 2 participants
    ...     new=[{"w": box} for box in dtensor_boxes((6, 4), mesh=[2], placements=[1])],  # columns instead
    ... )
    >>> plan.moved_bytes, plan.resident_bytes
    (48, 48)

Every participant then calls `reshard(plan, {"w": shard}, transport)`; docs/design/reshard.md has the whole example.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from typing import NamedTuple

from suika.core.cluster import Cluster, Device, Node
from suika.core.errors import SpecError, require
from suika.reshard.cells import Cell
from suika.reshard.links import Links
from suika.reshard.moveplan import CHUNK_BYTES, BufferSpecs, MovePlan, schedule_move
from suika.reshard.regions import Box, refine
from suika.reshard.routes import Demand
from suika.reshard.state import ITEM_BYTES, Region, StateKey

_ITEM_BYTES = {**ITEM_BYTES, "float16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1}
_ITEM_BYTES |= {"float8_e4m3fn": 1, "float8_e5m2": 1}
Shards = Mapping[str, Box | Sequence[Box]]  # one participant's: tensor -> what it holds of it


class TensorSpec(NamedTuple):
    """A whole (unsharded) tensor; `dtype` as torch names it, without "torch."."""

    shape: tuple[int, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class BoxHoldings:
    """Explicit boxes. A participant's buffer is named as its tensor; with several boxes `name#0`, `name#1`, ..."""

    tensors: Mapping[str, TensorSpec]
    shards: Sequence[Mapping[str, tuple[Box, ...]]]

    def regions(self, participant: int) -> Sequence[Region]:
        return tuple(
            Region(StateKey(name, "tensor"), box, buffer, 0)
            for name, buffer, box in self._buffers(participant)
            if box.numel
        )

    def specs(self, participant: int) -> BufferSpecs:
        return {buffer: (box.shape, self.tensors[name].dtype) for name, buffer, box in self._buffers(participant)}

    def name(self, participant: int) -> str:
        return f"participant {participant}"

    def _buffers(self, participant: int) -> list[tuple[str, str, Box]]:
        return [
            (name, name if len(boxes) == 1 else f"{name}#{i}", box)
            for name, boxes in self.shards[participant].items()
            for i, box in enumerate(boxes)
        ]


@dataclass(frozen=True)
class BoxGroup:
    """Cells that the same participants held and the same ones need."""

    cells: tuple[Cell, ...]

    @property
    def num_bytes(self) -> int:
        return self.ends[-1] if self.ends else 0

    @cached_property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(cell.num_bytes for cell in self.cells))


def plan_reshard(
    tensors: Mapping[str, TensorSpec],
    old: Sequence[Shards],
    new: Sequence[Shards],
    nodes: Sequence[str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> MovePlan:
    """The move of `tensors` from `old[p]` to `new[p]` for every participant p.

    `nodes[p]` names the node of p (default: all on one), so that a node gets one copy over the network. Raises
    `SpecError` for unknown tensors, boxes out of bounds or overlapping on one participant, and for elements that
    somebody needs and nobody holds.
    """
    require(
        len(old) == len(new), "new", len(new), f"old has {len(old)} participants", "give both sides the same number"
    )
    devices = _devices(nodes or ["host"] * len(old))
    sides = [
        [_checked(tensors, shards, f"{side}[{p}]") for p, shards in enumerate(given)]
        for side, given in (("old", old), ("new", new))
    ]
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Cell]] = defaultdict(list)
    for name, spec in tensors.items():
        item_bytes = _item_bytes(spec.dtype)
        boxes = [[(p, box) for p, shards in enumerate(side) for box in shards.get(name, ())] for side in sides]
        for cell in refine(box for side in boxes for _, box in side):
            holders, needers = (tuple(p for p, box in side if box.contains(cell)) for side in boxes)
            require(bool(holders) or not needers, f"new[{needers[:1]}].{name}", str(cell), "is held by nobody before")
            groups[holders, needers].append(Cell(StateKey(name, "tensor"), cell, item_bytes))
    found = [BoxGroup(tuple(sorted(cells, key=lambda c: -c.item_bytes))) for cells in groups.values()]
    demands = [Demand(*key, group.num_bytes) for key, group in zip(groups, found, strict=True)]
    nodes_of = Cluster(
        tuple(Node(n, sum(d.node == n for d in devices), "cpu") for n in dict.fromkeys(d.node for d in devices))
    )
    return schedule_move(
        Links(nodes_of, devices), BoxHoldings(tensors, sides[0]), BoxHoldings(tensors, sides[1]), found, demands,
        repr((sorted(tensors.items()), sides)), chunk_bytes,
    )  # fmt: skip


def dtensor_boxes(shape: tuple[int, ...], mesh: Sequence[int], placements: Sequence[object]) -> list[Box]:
    """What each rank of a device mesh (row-major) holds of a tensor under DTensor placements.

    `placements[axis]` is a dim number or `Shard(dim)`, None or `Replicate()`. Shards are cut as `torch.chunk` does:
    ceil sized, the last ones short or empty; later axes cut what earlier ones left. Partial sums are refused.
    """
    require(len(mesh) == len(placements), "placements", placements, f"mesh has {len(mesh)} axes, one placement each")
    boxes = []
    for place in product(*map(range, mesh)):
        starts, stops = [0] * len(shape), list(shape)
        for at, size, placement in zip(place, mesh, placements, strict=True):
            dim = _sharded_dim(placement, len(shape))
            if dim is not None:
                each = -(-(stops[dim] - starts[dim]) // size)
                start = min(starts[dim] + at * each, stops[dim])
                starts[dim], stops[dim] = start, min(start + each, stops[dim])
        boxes.append(Box(tuple(starts), tuple(stops)))
    return boxes


def _sharded_dim(placement: object, num_dims: int) -> int | None:
    kind = type(placement).__name__
    if placement is None or kind == "Replicate":
        return None
    dim = placement if isinstance(placement, int) else getattr(placement, "dim", None)
    if not isinstance(dim, int) or kind not in ("int", "Shard"):
        raise SpecError(
            "placements", placement, "cannot be resharded", "use Shard(dim) or Replicate(); reduce Partial first"
        )
    require(-num_dims <= dim < num_dims, "placements", placement, f"the tensor has {num_dims} dims")
    return dim % num_dims


def _item_bytes(dtype: str) -> int:
    require(dtype in _ITEM_BYTES, "dtype", dtype, "unknown", f"known: {', '.join(_ITEM_BYTES)}")
    return _ITEM_BYTES[dtype]


def _devices(nodes: Sequence[str]) -> list[Device]:
    seen: dict[str, int] = defaultdict(int)
    devices = []
    for node in nodes:
        devices.append(Device(node, seen[node]))
        seen[node] += 1
    return devices


def _checked(tensors: Mapping[str, TensorSpec], shards: Shards, where: str) -> dict[str, tuple[Box, ...]]:
    """One participant's shards with every value a tuple of boxes; refuses what cannot be."""
    found: dict[str, tuple[Box, ...]] = {}
    for name, given in shards.items():
        require(name in tensors, f"{where}.{name}", name, "is not one of the tensors")
        boxes = (given,) if isinstance(given, Box) else tuple(given)
        whole = Box.whole(tensors[name].shape)
        for i, box in enumerate(boxes):
            require(whole.contains(box), f"{where}.{name}", str(box), f"is outside the tensor {whole}")
            twice = any(box.intersect(other) for other in boxes[:i])
            require(not twice, f"{where}.{name}", str(box), "overlaps another box of the same participant")
        found[name] = boxes
    return found
