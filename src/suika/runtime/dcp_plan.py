"""Regions as PyTorch DCP sees them: each box is a chunk (offsets, sizes) of a logical tensor named `kind/tensor`.

A plan is a pure function of (job shape, plan): every rank derives all ranks' plans alone, so saving needs no collective
and DCP's own resharding reads the chunks into any other layout.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

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
from suika.reshard.regions import Box
from suika.reshard.state import JobShape, Region
from suika.runtime.pieces import Piece, chunk_name, dtypes, pieces


def place_of(piece: Piece) -> MetadataIndex:
    """What DCP calls the chunk."""
    return MetadataIndex(*piece.place)


def piece_view(piece: Piece, buffers: Mapping[str, Tensor]) -> Tensor:
    """The piece's elements in the live state, shaped as its box."""
    return region_view(piece.region, buffers)[piece.box.shifted(piece.region.box.starts).slices]


def region_view(region: Region, buffers: Mapping[str, Tensor]) -> Tensor:
    """The region's elements in its buffer, shaped as its box; no copy."""
    flat = buffers[region.buffer].view(-1)
    return flat[region.offset : region.offset + region.box.numel].view(region.box.shape)


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
    kinds = dtypes(shape)
    tables: dict[str, TensorStorageMetadata] = {}
    for mine in pieces(shape, plan):
        for piece in mine:
            key = piece.region.key
            if piece.name not in tables:
                properties = TensorProperties(dtype=getattr(torch, kinds[key.kind]))
                tables[piece.name] = TensorStorageMetadata(properties, Size(sizes[key.tensor]), [])
            tables[piece.name].chunks.append(_chunk(piece.box))
    return tables


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(Size(box.starts), Size(box.shape))


def _write_item(piece: Piece, table: TensorStorageMetadata) -> WriteItem:
    data = TensorWriteData(_chunk(piece.box), table.properties, table.size)
    return WriteItem(place_of(piece), WriteItemType.SHARD, tensor_data=data)


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
