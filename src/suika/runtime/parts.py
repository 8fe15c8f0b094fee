"""The state of a plan in parts: boxes that each rank holds whole or not at all, and who holds them. No torch.

What one rank holds is said by `reshard.state.rank_regions`. Of all ranks of a large job that is some hundred thousand
regions, but few cuts: layers of one kind are cut alike, masters and moments too, and a pipeline stage differs from
another one by its ranks alone. So each cut is made once, and put where it belongs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from typing import NamedTuple

from suika.core.plan import Plan
from suika.core.tensors import LogicalTensor, logical_tensors
from suika.reshard.regions import Box
from suika.reshard.state import (
    Bucket,
    JobShape,
    Region,
    StateKey,
    optimizer_kinds,
    rank_buckets,
    shard_box,
    slice_boxes,
)


class Held(NamedTuple):
    """The region of a rank in which a part lies: `box`, from `offset` on in its buffer for `end` of the tensor."""

    end: int
    box: Box
    offset: int


class Part(NamedTuple):
    """`owners`: by rank, ascending."""

    box: Box
    numel: int
    owners: Mapping[int, Held]


class Parts(NamedTuple):
    """Those of one tensor of the state. `buffers`: what it lies in; the other end of a tied model has another one."""

    key: StateKey
    buffers: tuple[str, ...]
    parts: tuple[Part, ...]

    def region(self, part: Part, rank: int) -> Region:
        """Of `rank`, which owns `part`."""
        end, box, offset = part.owners[rank]
        return Region(self.key, box, self.buffers[end], offset)


def parts_of(shape: JobShape, plan: Plan) -> list[Parts]:
    """All of the state, in the order in which ranks name it (`rank_regions`): what rank 0 holds, then what rank 1 holds
    besides, and so on. So are the parts of one tensor, but row-major where ranks' boxes overlap."""
    cuts = _Cuts(shape, plan)
    found: list[tuple[tuple[int, ...], Parts]] = []
    for tensor, spots in cuts.spots():
        kinds = ("weight", *optimizer_kinds(shape.precision)) if tensor.trained else ("weight",)
        for number, kind in enumerate(kinds):
            sliced = number > 0 or plan.layout.zero == 3
            cut = cuts.cut(tensor, spots, sliced)
            spot = spots[cut.end]
            place = (cut.first, min(number, 1), spot.place, number, spot.number)
            names = (f"{kind}/{spot.bucket.name if sliced else tensor.name}" for spot in spots)
            found.append((place, Parts(StateKey(tensor.name, kind), tuple(names), cut.parts)))
    return [parts for _, parts in sorted(found, key=lambda one: one[0])]


class _Spot(NamedTuple):
    """Where a tensor stands: it is number `number` of a bucket of a stage."""

    number: int
    bucket: Bucket  # of tensor-parallel rank 0
    bucket_number: int  # among those of its ranks
    place: int  # of the bucket in the model's order, which those of one rank are in
    form: int  # the same for buckets that are cut alike
    stage: int
    expert_rank: int | None  # that of the ranks which have it; None: all of the stage


class _Cut(NamedTuple):
    """`first`: the first rank that has any of it, at `end` of the tensor."""

    parts: tuple[Part, ...]
    first: int
    end: int

    @staticmethod
    def of(parts: Iterator[Part]) -> _Cut:
        kept = tuple(parts)
        first, held = min(next(iter(part.owners.items())) for part in kept)
        return _Cut(kept, first, held.end)


class _Cuts:
    """Each cut of a plan, made when it is asked for the first time."""

    def __init__(self, shape: JobShape, plan: Plan) -> None:
        self._shape, self._layout, self._mesh = shape, plan.layout, plan.mesh
        self._tensors = logical_tensors(shape.model, shape.sequence_length)
        self._made: dict[object, tuple[int, _Cut]] = {}  # with the stage for which it was
        self._shifted: dict[object, _Cut] = {}

    def spots(self) -> list[tuple[LogicalTensor, tuple[_Spot, ...]]]:
        """Of each tensor; a tied one has two."""
        position = {tensor.name: place for place, tensor in enumerate(self._tensors)}
        found: list[list[_Spot]] = [[] for _ in self._tensors]
        forms: dict[object, int] = {}
        for stage, experts in product(range(self._layout.pp), range(self._layout.ep)):
            for bucket_number, bucket in enumerate(self._buckets(stage, 0, experts)):
                routed = bucket.tensors[0].expert is not None
                if experts and not routed:
                    continue  # all expert ranks have it: it was seen with the first of them
                look = tuple(map(_look, bucket.tensors)), bucket.owner
                form, place = forms.setdefault(look, len(forms)), position[bucket.tensors[0].name]
                for number, tensor in enumerate(bucket.tensors):
                    about = place, form, stage, experts if routed else None
                    found[position[tensor.name]].append(_Spot(number, bucket, bucket_number, *about))
        return list(zip(self._tensors, map(tuple, found), strict=True))

    def cut(self, tensor: LogicalTensor, spots: tuple[_Spot, ...], sliced: bool) -> _Cut:
        """`sliced`: as ZeRO cuts it over replicas; else they hold the whole shard, in a buffer of its own."""
        spot = spots[0]
        like = (spot.form, spot.number, spot.expert_rank) if sliced else (_look(tensor), spot.expert_rank)
        name = like if len(spots) == 1 else (tensor.name, sliced)
        if name not in self._made:
            self._made[name] = spot.stage, _Cut.of(self._parts(tensor, spots, sliced))
        stage, cut = self._made[name]
        if stage == spot.stage:
            return cut
        if (name, spot.stage) not in self._shifted:
            by = self._mesh.rank(pp=spot.stage) - self._mesh.rank(pp=stage)
            self._shifted[name, spot.stage] = _shifted(cut, by)
        return self._shifted[name, spot.stage]

    def _parts(self, tensor: LogicalTensor, spots: tuple[_Spot, ...], sliced: bool) -> Iterator[Part]:
        held = [pair for end in range(len(spots)) for pair in self._held(tensor, spots[end], end, sliced)]
        boxes: dict[Box, dict[int, Held]] = {}
        for rank, region in sorted(held, key=lambda pair: pair[0]):
            boxes.setdefault(region.box, {})[rank] = region
        # Replicas cut differently (ZeRO slices of unequal shards) overlap in part: then cut along every edge.
        if sum(box.numel for box in boxes) != tensor.numel:
            boxes = _cells(boxes)
        assert sum(box.numel for box in boxes) == tensor.numel, f"{tensor.name} is not covered by {self._layout}"
        for box, owners in boxes.items():
            yield Part(box, box.numel, owners)

    def _held(self, tensor: LogicalTensor, spot: _Spot, end: int, sliced: bool) -> Iterator[tuple[int, Held]]:
        """(rank, region) at one end, the regions of a rank in its order."""
        experts, apart = (0, 1) if spot.expert_rank is None else (spot.expert_rank, self._layout.ep)
        for tp_rank in range(self._layout.tp):
            box = shard_box(tensor, self._layout.tp, tp_rank)
            if not box.numel:
                continue
            bucket = self._buckets(spot.stage, tp_rank, experts)[spot.bucket_number]
            begin = bucket.offsets[spot.number]
            slices = [bucket.slice_of(replica) for replica in range(bucket.replicas)]
            some = range(
                bisect_right(slices, begin, key=lambda part: part[1]),
                bisect_left(slices, begin + box.numel, key=lambda part: part[0]),
            )
            for replica in some if sliced else range(bucket.replicas):
                rank = self._rank(spot.stage, tp_rank, replica * apart + experts)
                found = slice_boxes(bucket, spot.number, box, replica) if sliced else ((box, 0),)
                for part, offset in found:
                    yield rank, Held(end, part, offset)

    def _buckets(self, stage: int, tp_rank: int, expert_rank: int) -> tuple[Bucket, ...]:
        rank, shape = self._rank(stage, tp_rank, expert_rank), self._shape
        return rank_buckets(shape.model, self._layout, shape.sequence_length, rank, self._mesh.order)

    def _rank(self, stage: int, tp_rank: int, replica: int) -> int:
        dp, cp = divmod(replica, self._layout.cp)
        return self._mesh.rank(dp=dp, pp=stage, cp=cp, tp=tp_rank)


def _look(tensor: LogicalTensor) -> tuple[object, ...]:
    """The same for tensors that tensor parallelism cuts alike."""
    return tensor.shape, tensor.tp_dim, tensor.tp_unit, tensor.shared_units


def _shifted(cut: _Cut, by: int) -> _Cut:
    """The same for ranks that are `by` higher."""
    parts = (Part(box, numel, {rank + by: at for rank, at in owners.items()}) for box, numel, owners in cut.parts)
    return _Cut(tuple(parts), cut.first + by, cut.end)


def _cells(boxes: Mapping[Box, Mapping[int, Held]]) -> dict[Box, dict[int, Held]]:
    """The cells of the grid through every edge, row-major, with the owners of all boxes that they lie in."""
    num_dims = len(next(iter(boxes)).starts)
    cuts = [sorted({box[side][d] for box in boxes for side in (0, 1)}) for d in range(num_dims)]
    cells: dict[Box, dict[int, Held]] = {}
    for box, owners in boxes.items():
        inside = [
            pairwise(cuts[d][bisect_left(cuts[d], start) : bisect_right(cuts[d], stop)])
            for d, (start, stop) in enumerate(zip(box.starts, box.stops, strict=True))
        ]
        for sides in product(*inside):
            starts, stops = zip(*sides, strict=True)
            cells.setdefault(Box(starts, stops), {}).update(owners)
    return {cell: dict(sorted(cells[cell].items())) for cell in sorted(cells)}
