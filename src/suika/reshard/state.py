"""What each rank of a layout holds: regions of logical tensors inside named local buffers. Pure functions.

Buffers of a rank:
    weight/<tensor>                          the tensor's local shard, shaped as `LogicalTensor.local_shape`
    m/<bucket>, v/<bucket>, master/<bucket>  1-D: this rank's ZeRO slice of the bucket's flat vector
A bucket's flat vector is its tensors' local shards, flattened, in `logical_tensors` order. Its name is `embedding`,
`layers.<i>`, `layers.<i>.experts` (routed experts: they have fewer replicas) or `head`; frozen tensors are in buckets
of their own (`layers.<i>.frozen`), which have no masters and no moments. With `zero_buckets="stage"` the layers of one
pipeline chunk share `layers.<first>-<last>`, the first replica owns all of `embedding` and the last all of `head`:
slices then follow the model's order, and a change of pp can leave them where they are. Under ZeRO 3 weights are slices
too: weight/<bucket>.
Masters exist for bf16 only: with fp32 and fp64 the weight is its own master.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from suika.core.job import JobSpec, Precision
from suika.core.layout import Layout
from suika.core.mesh import DEFAULT_ORDER, Coordinate, Mesh
from suika.core.model import ModelSpec
from suika.core.tensors import LogicalTensor, logical_tensors, on_stage
from suika.reshard.regions import Box, flat_range

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
_WEIGHT_DTYPE = {"fp32": "float32", "fp64": "float64", "bf16": "bfloat16"}


@dataclass(frozen=True)
class JobShape:
    """What of a job decides the bytes of its state."""

    model: ModelSpec
    sequence_length: int
    precision: Precision
    global_batch: int = 1

    @staticmethod
    def of(spec: JobSpec) -> JobShape:
        return JobShape(spec.model, spec.sequence_length, spec.precision, spec.global_batch)


class StateKey(NamedTuple):
    """One logical tensor of the training state: `kind` is weight, master, m or v."""

    tensor: str
    kind: str


class Region(NamedTuple):
    """The elements of `box`, row-major, lie at `buffer[offset : offset + box.numel]` of the flattened local buffer."""

    key: StateKey
    box: Box
    buffer: str
    offset: int


def weight_dtype(precision: Precision) -> str:
    return _WEIGHT_DTYPE[precision]


def optimizer_kinds(precision: Precision) -> dict[str, str]:
    """Kinds held per ZeRO slice -> dtype. Moments are never narrower than fp32."""
    if precision == "bf16":
        return {"master": "float32", "m": "float32", "v": "float32"}
    return {"m": weight_dtype(precision), "v": weight_dtype(precision)}


def zero_slice(numel: int, replicas: int, replica: int) -> tuple[int, int]:
    """Elements [start, stop) of a bucket of `numel` that replica `replica` of `replicas` owns.

    ceil(numel / replicas) each, cut to numel: no padding is stored, the last slices may be short or empty.
    """
    each = -(-numel // replicas)
    return min(replica * each, numel), min((replica + 1) * each, numel)


@dataclass(frozen=True)
class Bucket:
    """A ZeRO bucket as one rank sees it: `replicas` ranks hold the same shards, this one is number `replica`.

    Use `slice_of` rather than `zero_slice`: not every bucket is cut evenly.
    """

    name: str
    tensors: tuple[LogicalTensor, ...]
    shapes: tuple[tuple[int, ...], ...]  # local shard of each tensor
    replicas: int
    replica: int
    sharded: bool  # ZeRO >= 1: moments and masters are cut over the replicas
    owner: int | None = None  # the one replica that has them all; None: an even cut
    gathered: bool = False  # ZeRO 3: weights are cut as well, and gathered when they are used

    @property
    def trained(self) -> bool:
        """Whether it has masters and moments; else its tensors are frozen, all of them."""
        return self.tensors[0].trained

    @cached_property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each tensor's shard begins in the flat vector."""
        starts, at = [], 0
        for shape in self.shapes:
            starts.append(at)
            at += math.prod(shape)
        return tuple(starts)

    def slice_of(self, replica: int) -> tuple[int, int]:
        """Flat elements [start, stop) whose moments and masters `replica` holds."""
        if not self.sharded:
            return 0, self.numel
        if self.owner is None:
            return zero_slice(self.numel, self.replicas, replica)
        return (0 if replica <= self.owner else self.numel), (self.numel if replica >= self.owner else 0)

    @property
    def slice(self) -> tuple[int, int]:
        """`slice_of` this rank."""
        return self.slice_of(self.replica)


def expert_rank(layout: Layout, place: Coordinate) -> int:
    """Which share of the experts a rank holds: expert-parallel groups are consecutive in the (dp, cp) order."""
    return (place.dp * layout.cp + place.cp) % layout.ep


def bucket_owner(layout: Layout, name: str, replicas: int) -> int | None:
    """The replica that owns the whole bucket; None where all share it."""
    if layout.zero_buckets == "layer" or name not in ("embedding", "head"):
        return None
    return 0 if name == "embedding" else replicas - 1


def bucket_name(model: ModelSpec, layout: Layout, tensor: LogicalTensor, stage: int) -> str:
    """Name of the bucket of `tensor` on pipeline stage `stage` (which must hold it)."""
    name = _bucket_name(model, layout, tensor, stage)
    return name if tensor.trained else f"{name}.frozen"


def _bucket_name(model: ModelSpec, layout: Layout, tensor: LogicalTensor, stage: int) -> str:
    if tensor.place != "layer":
        # A tied embedding's second copy, on a last stage that is not the first, lives with the head.
        moved = tensor.place == "embedding" and stage != 0
        return "head" if moved or tensor.place == "head" else "embedding"
    assert tensor.layer is not None
    name = f"layers.{tensor.layer}"
    if layout.zero_buckets == "stage":
        first, last = next(c for c in layout.stage_chunks(model, stage) if c[0] <= tensor.layer < c[1])
        name = f"layers.{first}-{last - 1}"
    return name if tensor.expert is None else f"{name}.experts"


@lru_cache(maxsize=4096)
def stage_tensors(
    model: ModelSpec, layout: Layout, sequence_length: int, stage: int, expert_rank: int = 0
) -> tuple[LogicalTensor, ...]:
    """Tensors of a pipeline stage (all its virtual chunks), each once, in `logical_tensors` order."""
    chunks = layout.stage_chunks(model, stage)
    per_rank = model.experts // layout.ep
    return tuple(
        t
        for t in logical_tensors(model, sequence_length)
        if (t.expert is None or t.expert // per_rank == expert_rank)
        and any(on_stage(model, t, *chunk) for chunk in chunks)
    )


@lru_cache(maxsize=4096)
def rank_buckets(
    model: ModelSpec, layout: Layout, sequence_length: int, rank: int, order: tuple[str, ...] = DEFAULT_ORDER
) -> tuple[Bucket, ...]:
    """The buckets of `rank`, in order of their first tensors."""
    place = Mesh(layout, order).coordinate(rank)
    experts = expert_rank(layout, place)
    named: dict[str, list[LogicalTensor]] = {}
    for tensor in stage_tensors(model, layout, sequence_length, place.pp, experts):
        named.setdefault(bucket_name(model, layout, tensor, place.pp), []).append(tensor)
    replicas, replica = layout.dp * layout.cp, place.dp * layout.cp + place.cp
    found = []
    for name, tensors in named.items():
        apart = layout.ep if tensors[0].expert is not None else 1
        shapes = tuple(t.local_shape(layout.tp, place.tp) for t in tensors)
        owner = bucket_owner(layout, name, replicas)
        shared = replicas // apart, replica // apart
        found.append(Bucket(name, tuple(tensors), shapes, *shared, layout.zero >= 1, owner, layout.zero == 3))
    return tuple(found)


def shard_box(tensor: LogicalTensor, tp: int, tp_rank: int) -> Box:
    """The box of the logical tensor that a tensor-parallel rank holds."""
    if tensor.tp_dim is None:
        return Box.whole(tensor.shape)
    bounds = tensor.bounds(tp, tp_rank)
    sides = [(0, n) if d != tensor.tp_dim else bounds for d, n in enumerate(tensor.shape)]
    return Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))


@lru_cache(maxsize=512)
def rank_regions(
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    precision: Precision,
    rank: int,
    order: tuple[str, ...] = DEFAULT_ORDER,
) -> tuple[Region, ...]:
    """Everything `rank` holds, weights first. Empty shards and slices have no region (their buffers exist)."""
    tp_rank = Mesh(layout, order).coordinate(rank).tp
    weights: list[Region] = []
    optimizer: list[Region] = []
    for bucket in rank_buckets(model, layout, sequence_length, rank, order):
        boxes = [shard_box(t, layout.tp, tp_rank) for t in bucket.tensors]
        if layout.zero < 3:
            weights += [
                Region(StateKey(t.name, "weight"), box, f"weight/{t.name}", 0)
                for t, box in zip(bucket.tensors, boxes, strict=True)
                if box.numel
            ]
        else:
            weights += _slice_regions(bucket, boxes, "weight")
        for kind in optimizer_kinds(precision) if bucket.trained else ():
            optimizer += _slice_regions(bucket, boxes, kind)
    return tuple(weights + optimizer)


def _slice_regions(bucket: Bucket, boxes: list[Box], kind: str) -> Iterator[Region]:
    for number, (tensor, box) in enumerate(zip(bucket.tensors, boxes, strict=True)):
        for part, offset in slice_boxes(bucket, number, box, bucket.replica):
            yield Region(StateKey(tensor.name, kind), part, f"{kind}/{bucket.name}", offset)


def slice_boxes(bucket: Bucket, number: int, shard: Box, replica: int) -> Iterator[tuple[Box, int]]:
    """What `replica` holds in its slice of the bucket's tensor `number`, whose local shard is `shard`: boxes, and where
    they begin in the slice. A flat range of a matrix is up to three boxes."""
    start, stop = bucket.slice_of(replica)
    at = bucket.offsets[number]
    low, high = max(start - at, 0), min(stop - at, shard.numel)
    offset = at + low - start
    for part in flat_range(shard, low, high):
        yield part, offset
        offset += part.numel


def buffer_specs(
    model: ModelSpec,
    layout: Layout,
    sequence_length: int,
    precision: Precision,
    rank: int,
    order: tuple[str, ...] = DEFAULT_ORDER,
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Every buffer of `rank`: name -> (shape, dtype name), weights first; empty ones included."""
    buckets = rank_buckets(model, layout, sequence_length, rank, order)
    weights: dict[str, tuple[tuple[int, ...], str]] = {}
    optimizer: dict[str, tuple[tuple[int, ...], str]] = {}
    for bucket in buckets:
        length = bucket.slice[1] - bucket.slice[0]
        if layout.zero < 3:
            for tensor, shape in zip(bucket.tensors, bucket.shapes, strict=True):
                weights[f"weight/{tensor.name}"] = (shape, weight_dtype(precision))
        else:
            weights[f"weight/{bucket.name}"] = ((length,), weight_dtype(precision))
        for kind, dtype in optimizer_kinds(precision).items() if bucket.trained else ():
            optimizer[f"{kind}/{bucket.name}"] = ((length,), dtype)
    return weights | optimizer
