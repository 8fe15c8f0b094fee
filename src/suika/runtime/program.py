"""The seam between the runtime and a trainer: `Program` (one rank of one generation) and the groups it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from suika.core.job import JobSpec
from suika.core.plan import Plan

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class RankGroups:
    """Process groups of one rank in one generation; group rank = position on the axis. None: the axis has size 1.

    `dp` joins the replicas of a shard: the data- and the context-parallel axis together, in (dp, cp) order.
    `ends` joins the first and last pipeline stage of the same (dp, cp, tp) place, for a tied embedding.
    `ep` joins the neighbours among the replicas that share the experts out; `expert_dp` those that hold the same ones
    (None also where ep is 1: then these are the ranks of `dp`).
    """

    world: dist.ProcessGroup | None
    tp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None
    dp: dist.ProcessGroup | None
    ends: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None = None
    ep: dist.ProcessGroup | None = None
    expert_dp: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave; the same on every rank. `votes` are sums over all ranks."""

    step: int  # steps done after it
    loss: float  # mean over the global batch's valid tokens, before the update
    grad_norm: float
    lr: float
    num_tokens: int
    votes: tuple[float, ...]


class Program(Protocol):
    """One rank of one generation. Built beside a running generation in a side thread: it touches no global state.
    `device` is where its state lies, of one type on all ranks.

    Life: build (skeleton without storage) -> `bind` (all buffers) -> `load_records` -> (`begin`? `step`)*.
    """

    device: torch.device

    def buffer_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every buffer of this rank's state, as `reshard.state.rank_regions` names them."""
        ...

    def initialise(self) -> dict[str, torch.Tensor]:
        """Fresh buffers at step 0: a pure function of (seed, tensor name, element), the same in every layout."""
        ...

    def bind(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Make `buffers` the live state, without a copy. After it the module and optimizer use this very memory."""
        ...

    def buffers(self) -> Mapping[str, torch.Tensor]:
        """The live state."""
        ...

    def records(self) -> dict[str, Any]:
        """Scalars that move with the state (steps done, optimizer step, loss scale): JSON, the same on all ranks."""
        ...

    def load_records(self, records: Mapping[str, Any]) -> None: ...

    def begin(self) -> None:
        """Forward and backward of the next step, which `step` then goes on from. Reads the weights and nothing else of
        the state (the rest may still be arriving) and changes nothing of it: dropping the program undoes it."""
        ...

    def step(self, votes: Sequence[float]) -> StepResult:
        """One optimizer step on the global batch that follows. `votes` are summed over all ranks in the same
        all-reduce as the gradient norm, so that every rank sees the same sums after the same step."""
        ...


class BuildProgram(Protocol):
    """What `module:function` in a job's launch names, e.g. `suika.train.program:build`."""

    def __call__(self, spec: JobSpec, plan: Plan, rank: int, groups: RankGroups, data_path: str) -> Program: ...
