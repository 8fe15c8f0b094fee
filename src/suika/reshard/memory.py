"""How much memory a move needs on each device, before anything stops.

keep: old and new buffers live side by side until the commit (an abort only forgets the new ones):
      peak = source + new buffers that are not kept + messages in flight + scratch
lean: a source region goes as soon as a verified copy of it is acknowledged:
      peak = max(source, target) + 2 chunks
`step_bytes` is what the job needs on top while it runs: activations, gradients, communicators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from suika.core.cluster import Device
from suika.core.errors import SpecError
from suika.reshard.moveplan import BufferSpecs, MovePlan
from suika.reshard.rounds import WINDOW
from suika.reshard.state import ITEM_BYTES


class Peak(NamedTuple):
    """One device's memory in a move, in bytes. `scratch`: the largest cell, gathered to be hashed."""

    source: int
    target: int
    kept: int
    staging: int
    scratch: int
    chunk: int

    @property
    def keep(self) -> int:
        return self.source + self.target - self.kept + self.staging + self.scratch

    @property
    def lean(self) -> int:
        return max(self.source, self.target) + 2 * self.chunk

    @property
    def extra(self) -> int:
        """What `keep` needs beyond the larger of the two states."""
        return self.keep - max(self.source, self.target)


def peaks(plan: MovePlan) -> tuple[Peak, ...]:
    """The peak of each participant (exact but for staging and scratch, which are upper bounds)."""
    largest = [0] * len(plan.participants)
    busiest = [0] * len(plan.participants)
    for group, demand in zip(plan.groups, plan.demands, strict=True):
        cell_bytes = max((cell.num_bytes for cell in group.cells), default=0)
        for participant in {*demand.holders, *demand.needers}:
            largest[participant] = max(largest[participant], cell_bytes)
    for stream in plan.streams:
        busiest[stream.src] += stream.num_bytes
        busiest[stream.dst] += stream.num_bytes
    found = []
    for participant in range(len(plan.participants)):
        target = plan.new.specs(participant)
        kept = {name: target[name] for name in plan.kept(participant)}
        found.append(
            Peak(
                source=size_of(plan.old.specs(participant)),
                target=size_of(target),
                kept=size_of(kept),
                staging=min(WINDOW * plan.chunk_bytes, busiest[participant]),
                scratch=largest[participant],
                chunk=plan.chunk_bytes,
            )
        )
    return tuple(found)


def require_fit(plan: MovePlan, capacity_bytes: Mapping[Device, int], step_bytes: Sequence[int] | int = 0) -> None:
    """Refuse a move that cannot keep both states side by side on every device.

    `capacity_bytes`: what each device has; `step_bytes`: of each participant, or the same of all. Raises `SpecError`
    that names the first device that is too small and what it would need in either mode.
    """
    for i, (device, peak) in enumerate(zip(plan.participants, peaks(plan), strict=True)):
        step = step_bytes if isinstance(step_bytes, int) else step_bytes[i]
        if peak.keep + step > capacity_bytes[device]:
            raise SpecError(
                "move",
                str(device),
                f"needs {peak.keep + step:,} bytes ({peak.source:,} now, {peak.target - peak.kept:,} new, "
                f"{peak.staging + peak.scratch:,} in flight, {step:,} for the step) of {capacity_bytes[device]:,}; "
                f"letting go of old state early would need {peak.lean + step:,}",
                "move in two steps, onto more devices, or through a snapshot",
            )


def size_of(specs: BufferSpecs) -> int:
    """Bytes of buffers."""
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for shape, dtype in specs.values())
