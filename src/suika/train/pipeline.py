"""Forward and backward over a rank's micro-batches: 1F1B with stages, a plain loop without.

With several chunks per stage the order is Megatron's interleaved 1F1B (arXiv 2104.04473): chunk c runs on stage c % pp,
and pp micro-batches go through one chunk before a rank turns to its next. Nobody blocks in a send, and what two ranks
send each other is received in the order in which it was sent: one connection carries all chunks in both directions.

Gradients are of the *sum* of token losses: nothing is scaled before the whole batch is known, so uneven micro-batch
counts need no weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from suika.train.axis import Axis
from suika.train.stage import Chunk, Stage


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
            loss = self.stage.loss(self.stage.forward(ids), wanted)
            loss.backward()
            losses.append(loss.detach())
        return losses


class StagedPipeline:
    """One of several stages under a 1F1B schedule. Shapes are static: no metadata is exchanged."""

    def __init__(self, stage: Stage, num_micro_batches: int, micro_batch: int, pp: Axis) -> None:
        self.first, self.last = stage.is_first, stage.is_last
        pieces = [
            _piece(chunk, number, len(stage.chunks), micro_batch, pp) for number, chunk in enumerate(stage.chunks)
        ]
        self.schedule: Schedule1F1B | ScheduleInterleaved1F1B
        if len(pieces) == 1:
            self.schedule = Schedule1F1B(pieces[0], num_micro_batches, loss_fn=stage.loss, scale_grads=False)
        else:
            self.schedule = ScheduleInterleaved1F1B(pieces, num_micro_batches, loss_fn=stage.loss, scale_grads=False)  # type: ignore[arg-type]

    def run(self, tokens: Tensor | None, targets: Tensor | None) -> list[Tensor]:
        """As `SinglePipeline.run`; the first stage needs the ids, the last the targets and gives the losses."""
        losses: list[Tensor] = []
        inputs = (tokens,) if self.first else ()
        if self.last:
            self.schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self.schedule.step(*inputs, return_outputs=False)
        return [loss.detach() for loss in losses]


def _piece(chunk: Chunk, number: int, num_chunks: int, micro_batch: int, pp: Axis) -> PipelineStage:
    """A rank's chunk `number` of `num_chunks` as torch's schedules want it.

    A PipelineStage asks the default process group for its rank, and there is none here (nor could one be right:
    generations number their ranks differently). It is built outside of any group, then told its place.
    """
    boundary = chunk.boundary(micro_batch)
    ids = torch.empty((micro_batch, chunk.length), dtype=torch.int64, device="meta")
    piece = PipelineStage(
        chunk,
        number * pp.size + pp.rank,
        num_chunks * pp.size,
        torch.device("cpu"),
        input_args=ids if chunk.is_first else boundary,
        output_args=chunk.logits_example(micro_batch) if chunk.is_last else boundary,
        group=dist.GroupMember.NON_GROUP_MEMBER,  # type: ignore[arg-type]
    )
    piece.group, piece.group_rank, piece.group_size = pp.group, pp.rank, pp.size
    piece.stage_index_to_group_rank = {i: i % pp.size for i in range(num_chunks * pp.size)}
    return piece


def build_pipeline(stage: Stage, num_micro_batches: int, micro_batch: int, pp: Axis) -> SinglePipeline | StagedPipeline:
    if pp.size == 1:
        return SinglePipeline(stage, num_micro_batches)
    return StagedPipeline(stage, num_micro_batches, micro_batch, pp)
