"""One rank of one generation: layout, placement, groups and program under a number that is never used twice."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from suika.core.cluster import Device
from suika.core.job import JobSpec
from suika.core.plan import Plan
from suika.reshard.state import JobShape
from suika.reshard.transports import memfd
from suika.runtime import groups as process_groups
from suika.runtime import snapshot
from suika.runtime.program import Program, RankGroups

GROUP_TIMEOUT_S = 1800.0  # no safeguard: death and silence are noticed from outside, and the connections broken


@dataclass(frozen=True)
class RankJob:
    """What a rank knows of its job, the same in all generations."""

    job_id: str
    spec: JobSpec
    device: Device
    program: str  # module:function of a `BuildProgram`
    data_path: str
    snapshots: Path

    @staticmethod
    def of(launch: Mapping[str, Any]) -> RankJob:
        return RankJob(
            job_id=launch["job_id"],
            spec=JobSpec.model_validate(launch["spec"]),
            device=Device.parse(launch["device"]),
            program=launch["program"],
            data_path=launch["data_path"],
            snapshots=Path(launch["snapshots"]),
        )

    @property
    def shape(self) -> JobShape:
        return JobShape.of(self.spec)


@dataclass(frozen=True)
class Generation:
    """This rank's part of a generation. Its program may still be without storage."""

    number: int
    plan: Plan
    rank: int
    groups: RankGroups
    program: Program

    @staticmethod
    def build(job: RankJob, number: int, plan: Plan, store: dist.Store) -> Generation:
        """Groups and program skeleton. Runs beside a training generation; blocks until all ranks of `plan` do it."""
        rank = plan.devices.index(job.device)
        name = f"{job.job_id}/{number}/{plan.digest}"
        groups = process_groups.build_groups(store, name, plan.mesh, rank, GROUP_TIMEOUT_S)
        module, _, function = job.program.partition(":")
        build_program = getattr(importlib.import_module(module), function)
        try:
            program = build_program(job.spec, plan, rank, groups, job.data_path)
        except BaseException:
            process_groups.destroy(groups)
            raise
        return Generation(number, plan, rank, groups, program)

    def fill(self, job: RankJob, folder: str | None) -> None:
        """Give the program its first state: a fresh one, or that of a snapshot of any layout."""
        self.furnish()
        if folder is not None:
            self.program.load_records(
                snapshot.load(Path(folder), job.shape, self.plan, self.rank, self.program.buffers())
            )

    def furnish(self) -> None:
        """A fresh state. It lies in memory that a move can show to other processes of this host."""
        buffers = self.program.initialise()
        for name, buffer in buffers.items():  # one by one: no second copy of the state
            buffers[name] = memfd.placed(buffer)
        self.program.bind(buffers)

    def destroy(self) -> None:
        process_groups.destroy(self.groups)
