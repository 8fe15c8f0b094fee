"""A program with the real state of a real model and no model: every element follows its own exact recurrence.

An element's value after any number of steps depends on its place in the logical tensor alone, so that every layout and
every chain of moves must give the same bits. It is loaded by name in the ranks, as a trainer is.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suika.core.host_memory import host_memory
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.core.tensors import logical_tensors
from suika.reshard import lean
from suika.reshard.regions import Box
from suika.reshard.state import StateKey, buffer_specs
from suika.reshard.transports import memfd
from suika.runtime import snapshot
from suika.runtime.dcp_plan import piece_view, region_view
from suika.runtime.pieces import Piece, pieces, plan_regions
from suika.runtime.program import RankGroups, StepResult

FAULT = "fault.json"
_carry_whole = lean.LeanMove._carry_whole
_write = snapshot.write


def build(spec: JobSpec, plan: Plan, rank: int, groups: RankGroups, data_path: str) -> TinyProgram:
    lean.LeanMove._carry_whole = partialmethod(_carry_piece, folder=data_path)
    fail_at("build", plan, rank, data_path)
    snapshot.write = partial(_write_when_free, Path(data_path) / "slow-disk")
    memfd.available_bytes = partial(_available, Path(data_path) / "available")
    if (Path(data_path) / f"refuse-{plan.layout.num_ranks}").exists():
        raise MemoryError("refused to build, as the test wanted")
    return TinyProgram(spec, plan, rank, groups, data_path)


def _write_when_free(slow: Path, folder: Path, captured: snapshot.Captured) -> None:
    """A disk that takes as long as the test wants."""
    while slow.exists():
        time.sleep(0.02)
    _write(folder, captured)


def _available(said: Path) -> int:
    """Bytes of memory: what the test says, as long as it says something."""
    return int(said.read_text()) if said.exists() else host_memory().available_bytes


class TinyProgram:
    device = torch.device("cpu")

    def __init__(self, spec: JobSpec, plan: Plan, rank: int, groups: RankGroups, data_path: str) -> None:
        self.spec, self.plan, self.rank, self.world = spec, plan, rank, groups.world
        from suika.reshard.state import JobShape

        self.shape = JobShape.of(spec)
        self.regions = plan_regions(self.shape, plan, rank)
        specs = buffer_specs(spec.model, plan.layout, spec.sequence_length, spec.precision, rank, plan.order)
        self._specs = {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in specs.items()}
        self._mine: tuple[Piece, ...] = pieces(self.shape, plan)[rank]
        self._buffers: dict[str, Tensor] = {}
        self._fail_at = partial(fail_at, plan=plan, rank=rank, folder=data_path)
        self._step, self._begun = 0, False
        self._step_s = float(os.environ.get("TINY_STEP_S", "0.02"))

    def buffer_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._specs

    def initialise(self) -> dict[str, Tensor]:
        buffers = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self._specs.items()}
        shapes = {t.name: t.shape for t in logical_tensors(self.spec.model, self.spec.sequence_length)}
        for region in self.regions:
            region_view(region, buffers).copy_(first_values(region.key, shapes[region.key.tensor], region.box))
        return buffers

    def bind(self, buffers: Mapping[str, Tensor]) -> None:
        self._fail_at("bind")
        for name, (shape, dtype) in self._specs.items():
            assert (buffers[name].shape, buffers[name].dtype) == (shape, dtype), name
        self._buffers = dict(buffers)

    def buffers(self) -> Mapping[str, Tensor]:
        self._fail_at("buffers")
        return self._buffers

    def records(self) -> dict[str, Any]:
        return {"steps_done": self._step, "position": self._step * self.spec.global_batch}

    def load_records(self, records: Mapping[str, Any]) -> None:
        self._fail_at("load_records")
        self._step = records["steps_done"]
        assert records["position"] == self._step * self.spec.global_batch

    def begin(self) -> None:
        """All ranks compute and talk, as in a forward and backward pass: over weights alone."""
        if not self._begun:
            time.sleep(self._step_s)
            self._fail_at("begin")
            weights = sum(float(t.double().sum()) for name, t in self._buffers.items() if name.startswith("weight/"))
            assert math.isfinite(weights), "computed with weights that have not arrived"
            if self.world is not None:
                self.world.allreduce([torch.tensor([weights])]).wait()
            self._begun = True

    def step(self, votes: Sequence[float]) -> StepResult:
        self.begin()
        self._begun = False
        self._fail_at("step")
        loss = sum(float(piece_view(piece, self._buffers).double().sum()) for piece in self._mine)
        totals = torch.tensor([loss, *votes], dtype=torch.float64)
        if self.world is not None:
            self.world.allreduce([totals]).wait()
        for region in self.regions:
            advance(region_view(region, self._buffers), self._step)
        self._step += 1
        return StepResult(self._step, float(totals[0]), 1.0, 0.1, 1, tuple(totals[1:].tolist()))


def _carry_piece(self: lean.LeanMove, *arguments: Any, folder: str) -> None:
    """One piece of a lean move, in which memory may be refused as any allocation can be."""
    make, number = self._make, self._done
    there = number < len(self._pieces) and arguments[0] is self._pieces[number].there
    try:
        fail_on(f"piece-{number}" if there else "piece-back", str(self._device), 0, folder)
    except MemoryError as error:
        refused = error

        def refuse(*_: Any) -> Tensor:
            raise refused

        self._make = refuse
    try:
        _carry_whole(self, *arguments)
    finally:
        self._make = make


def lay_ready(folder: Path, wanted: dict[str, Any]) -> None:
    """Whole or not at all: ranks may look at any time."""
    draft = folder / f"{FAULT}.tmp"
    draft.write_text(json.dumps(wanted))
    draft.rename(folder / FAULT)


def fail_at(point: str, plan: Plan, rank: int, folder: str) -> None:
    fail_on(point, str(plan.devices[rank]), plan.layout.num_ranks, folder)


def fail_on(point: str, device: str, num_ranks: int, folder: str) -> None:
    """What the test has laid ready for this device at this point of a generation with so many ranks, once: a signal,
    memory that is refused, an error that nobody expects, or every network connection of this process cut."""
    try:
        wanted = json.loads((Path(folder) / FAULT).read_text())
    except OSError:
        return
    if wanted["at"] != [point, device, num_ranks]:
        return
    (Path(folder) / FAULT).unlink()
    match wanted["do"]:
        case "raise":
            raise ZeroDivisionError("unexpected, as the test wanted")
        case "refuse":
            raise MemoryError("refused, as the test wanted")
        case "cut":
            cut_links()
        case name:
            os.kill(os.getpid(), signal.Signals[name])


def cut_links() -> None:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as link:
            if link.family == socket.AF_INET and not link.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                link.shutdown(socket.SHUT_RDWR)


def first_values(key: StateKey, shape: tuple[int, ...], box: Box) -> Tensor:
    """Value of each element of `box`: a function of its key and its place in the logical tensor."""
    places = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)[box.slices]
    return torch.sin(places + zlib.crc32(f"{key.kind}/{key.tensor}".encode()) % 1000)


def advance(values: Tensor, step: int) -> None:
    values.mul_(0.75).add_(1.0 / (step + 3))
