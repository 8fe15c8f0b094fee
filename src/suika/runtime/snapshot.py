"""Snapshots: PyTorch DCP files plus an atomic manifest, written from any layout and read into any other.

A rank copies the regions that it is to write (each box of the state is written once, replicas take turns) and writes
the copy in the background. No collective is involved: every rank derives the whole plan from the layout alone. When
all have written, rank 0 publishes: it adds DCP's `.metadata`, then a manifest by rename. A folder without a manifest,
or whose files are not as long as it says, is not a snapshot.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from suika.core.plan import Plan
from suika.reshard.state import JobShape
from suika.runtime import dcp_plan
from suika.runtime.pieces import pieces, plan_regions

MANIFEST = "manifest.json"
RETENTION = 2
_FORMAT = 1


class SnapshotError(RuntimeError):
    """Not a complete snapshot of this job."""


@dataclass(frozen=True)
class Captured:
    """What one rank will write: copies, so that training goes on meanwhile."""

    shape: JobShape
    plan: Plan
    rank: int
    step: int
    records: Mapping[str, Any]
    tensors: Mapping[MetadataIndex, Tensor]


def capture(
    shape: JobShape, plan: Plan, rank: int, step: int, records: Mapping[str, Any], buffers: Mapping[str, Tensor]
) -> Captured:
    """Copy this rank's share of the state."""
    with torch.no_grad():
        mine = pieces(shape, plan)[rank]
        tensors = {dcp_plan.place_of(piece): dcp_plan.piece_view(piece, buffers).clone() for piece in mine}
    return Captured(shape, plan, rank, step, dict(records), tensors)


def folder_of(snapshots: Path, step: int, generation: int) -> Path:
    return snapshots / f"step-{step:010}.g{generation}"


def write(folder: Path, captured: Captured) -> None:
    """Write one rank's share into `folder` and flush it to the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    plans = dcp_plan.save_plans(captured.shape, captured.plan)
    writer = dcp.FileSystemWriter(folder)
    writer.set_up_storage_writer(captured.rank == 0, rank=captured.rank)
    mine = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])[captured.rank]
    results = writer.write_data(mine, dcp_plan.PiecePlanner(captured.tensors)).wait()
    _write_durably(folder / f"results-{captured.rank}", pickle.dumps(results))


def publish(folder: Path, captured: Captured, generation: int, job_id: str) -> None:
    """Make the folder a snapshot: every rank has written. Older snapshots beyond the retention are removed."""
    num_ranks = captured.plan.layout.num_ranks
    result_files = [folder / f"results-{rank}" for rank in range(num_ranks)]
    results = [pickle.loads(path.read_bytes()) for path in result_files]
    dcp.FileSystemWriter(folder).finish(dcp_plan.metadata(captured.shape, captured.plan), results)
    for path in result_files:
        path.unlink()
    manifest = {
        "format": _FORMAT,
        "job_id": job_id,
        "generation": generation,
        "step": captured.step,
        "records": captured.records,
        "plan": captured.plan.to_dict(),
        "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
    }
    _write_durably(folder / MANIFEST, json.dumps(manifest, indent=1).encode())
    _prune(folder.parent, keep=folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete snapshot; raises `SnapshotError` for anything else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{folder.name} is not a finished snapshot: {error}") from None
    if manifest["format"] != _FORMAT:
        raise SnapshotError(f"{folder.name} has format {manifest['format']}, not {_FORMAT}")
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            raise SnapshotError(f"{folder.name}/{name} is not the {size} bytes that were written")
    return manifest


def load(folder: Path, shape: JobShape, plan: Plan, rank: int, buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fill every region of `buffers` for `rank` of `plan`, whatever layout wrote the snapshot; returns the records."""
    manifest = read_manifest(folder)
    planner = dcp_plan.RegionLoadPlanner(plan_regions(shape, plan, rank), buffers)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "assuming a single process": each rank reads for itself
        dcp.load({}, storage_reader=dcp.FileSystemReader(folder), planner=planner, no_dist=True)
    records = manifest["records"]
    assert isinstance(records, dict)
    return records


def newest(snapshots: Path) -> Path | None:
    """The newest complete snapshot in a job's folder."""
    for folder in sorted(snapshots.glob("step-*"), reverse=True):
        try:
            read_manifest(folder)
        except SnapshotError:
            continue
        return folder
    return None


def _prune(snapshots: Path, keep: Path) -> None:
    """Keep the newest complete snapshots; what is older than the newest and has no manifest never became one."""
    older = sorted((p for p in snapshots.glob("step-*") if p.name < keep.name), reverse=True)
    complete = [p for p in older if (p / MANIFEST).is_file()]
    for folder in older:
        if folder not in complete[: RETENTION - 1]:
            shutil.rmtree(folder, ignore_errors=True)


def _write_durably(path: Path, data: bytes) -> None:
    """All of `data` under `path`, or nothing, also after a power cut."""
    draft = path.with_name(path.name + ".tmp")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    parent = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(parent)
    finally:
        os.close(parent)
