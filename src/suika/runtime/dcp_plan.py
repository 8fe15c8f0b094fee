"""Regions as PyTorch DCP sees them: each box is a chunk (offsets, sizes) of a logical tensor named `kind/tensor`.

A plan is a pure function of (job shape, plan): every rank derives all ranks' plans alone, so saving needs no collective
and DCP's own resharding reads the chunks into any other layout.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from suika.core.plan import Plan
from suika.core.tensors import logical_tensors
from suika.reshard.regions import Box, refine
from suika.reshard.state import JobShape, Region, StateKey, optimizer_kinds, rank_regions, weight_dtype


class Piece(NamedTuple):
    """A box that one rank writes, out of a region that it holds."""

    box: Box
    region: Region

    @property
    def name(self) -> str:
        return chunk_name(self.region.key)

    @property
    def place(self) -> MetadataIndex:
        """What DCP calls the chunk."""
        return MetadataIndex(self.name, self.box.starts)

    def view(self, buffers: Mapping[str, Tensor]) -> Tensor:
        """The piece's elements in the live state, shaped as its box."""
        return region_view(self.region, buffers)[self.box.shifted(self.region.box.starts).slices]


def chunk_name(key: StateKey) -> str:
    return f"{key.kind}/{key.tensor}"


def region_view(region: Region, buffers: Mapping[str, Tensor]) -> Tensor:
    """The region's elements in its buffer, shaped as its box; no copy."""
    flat = buffers[region.buffer].view(-1)
    return flat[region.offset : region.offset + region.box.numel].view(region.box.shape)


def plan_regions(shape: JobShape, plan: Plan, rank: int) -> tuple[Region, ...]:
    return rank_regions(shape.model, plan.layout, shape.sequence_length, shape.precision, rank, plan.order)


@lru_cache(maxsize=8)
def pieces(shape: JobShape, plan: Plan) -> tuple[tuple[Piece, ...], ...]:
    """What each rank writes: every element of the state exactly once, by the owner with the least to write so far."""
    owners: dict[StateKey, dict[Box, list[tuple[int, Region]]]] = {}
    for rank in range(plan.layout.num_ranks):
        for region in plan_regions(shape, plan, rank):
            owners.setdefault(region.key, {}).setdefault(region.box, []).append((rank, region))
    numel = {tensor.name: tensor.numel for tensor in logical_tensors(shape.model, shape.sequence_length)}
    found: list[list[Piece]] = [[] for _ in range(plan.layout.num_ranks)]
    load = [0] * plan.layout.num_ranks
    for key, boxes in owners.items():
        whole = numel[key.tensor]
        # Replicas cut differently (ZeRO slices of unequal shards) overlap in part: then cut along every edge.
        parts = list(boxes) if sum(box.numel for box in boxes) == whole else refine(boxes)
        assert sum(part.numel for part in parts) == whole, f"{key} is not covered by {plan.layout}"
        for part in parts:
            copies = [copy for box, holders in boxes.items() if box.contains(part) for copy in holders]
            rank, region = min(copies, key=lambda copy: (load[copy[0]], copy[0]))
            load[rank] += part.numel
            found[rank].append(Piece(part, region))
    return tuple(map(tuple, found))


def save_plans(shape: JobShape, plan: Plan) -> list[SavePlan]:
    """DCP's save plan of every rank."""
    tables = _tables(shape, plan)
    return [
        SavePlan([_write_item(piece, tables[piece.name]) for piece in mine], planner_data=None)
        for mine in pieces(shape, plan)
    ]


def metadata(shape: JobShape, plan: Plan) -> Metadata:
    """DCP's description of the whole snapshot, without the files' offsets."""
    return Metadata(state_dict_metadata=dict(_tables(shape, plan)))


def _tables(shape: JobShape, plan: Plan) -> dict[str, TensorStorageMetadata]:
    sizes = {tensor.name: tensor.shape for tensor in logical_tensors(shape.model, shape.sequence_length)}
    dtypes = {"weight": weight_dtype(shape.precision), **optimizer_kinds(shape.precision)}
    tables: dict[str, TensorStorageMetadata] = {}
    for mine in pieces(shape, plan):
        for piece in mine:
            key = piece.region.key
            if piece.name not in tables:
                properties = TensorProperties(dtype=getattr(torch, dtypes[key.kind]))
                tables[piece.name] = TensorStorageMetadata(properties, Size(sizes[key.tensor]), [])
            tables[piece.name].chunks.append(_chunk(piece.box))
    return tables


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(box.starts), Size(box.shape))


def _write_item(piece: Piece, table: TensorStorageMetadata) -> WriteItem:
    data = TensorWriteData(_chunk(piece.box), table.properties, table.size)
    return WriteItem(piece.place, WriteItemType.SHARD, tensor_data=data)


class PiecePlanner(SavePlanner):
    """Hands a rank's captured pieces to DCP's writer; the plan itself is made by `save_plans`."""

    def __init__(self, captured: Mapping[MetadataIndex, Tensor]) -> None:
        self._captured = captured

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._captured[write_item.index]

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        raise AssertionError("plans are made by save_plans")

    def create_local_plan(self) -> SavePlan:
        raise AssertionError("plans are made by save_plans")

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        raise AssertionError("plans are made by save_plans")

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan


class RegionLoadPlanner(LoadPlanner):
    """Lets DCP read whatever chunks overlap a rank's regions straight into its buffers."""

    def __init__(self, regions: Sequence[Region], buffers: Mapping[str, Tensor]) -> None:
        self._buffers = buffers
        self._by_name: dict[str, list[Region]] = {}
        for region in regions:
            self._by_name.setdefault(chunk_name(region.key), []).append(region)
        self._metadata: Metadata | None = None

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items = []
        for name, regions in self._by_name.items():
            table = self._metadata.state_dict_metadata[name]
            assert isinstance(table, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, table, [_chunk(region.box) for region in regions])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        target = region_view(self._by_name[index.fqn][index.index], self._buffers)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing to do: `resolve_tensor` gave the live memory."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("a snapshot holds tensors only; records are in its manifest")
