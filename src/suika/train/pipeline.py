"""Forward and backward over a rank's micro-batches: 1F1B with stages, a plain loop without.

Gradients are of the *sum* of token losses: nothing is scaled before the whole batch is known, so uneven micro-batch
counts need no weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from suika.train.axis import Axis
from suika.train.stage import Stage


class SinglePipeline:
    """One stage: micro-batches one after the other."""

    def __init__(self, stage: Stage, num_micro_batches: int) -> None:
        self.stage, self.num_micro_batches = stage, num_micro_batches

    def run(self, tokens: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """(M x B, L) ids and targets -> the loss sum of each micro-batch. Adds to the gradients."""
        assert tokens is not None
        assert targets is not None
        losses = []
        for ids, wanted in zip(
            tokens.chunk(self.num_micro_batches), targets.chunk(self.num_micro_batches), strict=True
        ):
            loss = self.stage.loss(self.stage(ids), wanted)
            loss.backward()
            losses.append(loss.detach())
        return losses


class StagedPipeline:
    """One of several stages under the 1F1B schedule. Shapes are static: no metadata is exchanged."""

    def __init__(self, stage: Stage, num_micro_batches: int, micro_batch: int, pp: Axis) -> None:
        self.first, self.last = stage.is_first, stage.is_last
        boundary = stage.boundary(micro_batch)
        ids = torch.empty((micro_batch, stage.length), dtype=torch.int64, device="meta")
        # A PipelineStage asks the default process group for its rank, and there is none here (nor could one be right:
        # generations number their ranks differently). It is built outside of any group, then told its place.
        piece = PipelineStage(
            stage,
            pp.rank,
            pp.size,
            torch.device("cpu"),
            input_args=ids if self.first else boundary,
            output_args=stage.logits_example(micro_batch) if self.last else boundary,
            group=dist.GroupMember.NON_GROUP_MEMBER,  # type: ignore[arg-type]
        )
        piece.group, piece.group_rank, piece.group_size = pp.group, pp.rank, pp.size
        piece.stage_index_to_group_rank = {i: i for i in range(pp.size)}
        self.schedule = Schedule1F1B(piece, num_micro_batches, loss_fn=stage.loss, scale_grads=False)

    def run(self, tokens: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """As `SinglePipeline.run`; the first stage needs the ids, the last the targets and gives the losses."""
        losses: list[Tensor] = []
        inputs = (tokens,) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        return [loss.detach() for loss in losses]


def build_pipeline(stage: Stage, num_micro_batches: int, micro_batch: int, pp: Axis) -> SinglePipeline | StagedPipeline:
    if pp.size == 1:
        return SinglePipeline(stage, num_micro_batches)
    return StagedPipeline(stage, num_micro_batches, micro_batch, pp)
