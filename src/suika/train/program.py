"""The built-in trainer as the runtime sees it: `build` makes one rank of one generation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from suika.core.job import JobSpec
from suika.core.layout import micro_batch_shares
from suika.core.mesh import Mesh
from suika.core.plan import Plan
from suika.reshard.state import buffer_specs, optimizer_kinds, rank_buckets, shard_box, weight_dtype
from suika.runtime.profiler import span
from suika.runtime.program import RankGroups, StepResult
from suika.train.axis import Axis, Replicas, TensorParallel
from suika.train.dataset import Dataset
from suika.train.gradients import Gradients
from suika.train.initial import initial_shard
from suika.train.limits import check_runnable
from suika.train.masks import Masks, step_masks
from suika.train.optimizer import AdamW, learning_rate
from suika.train.parallel import Parallel, take
from suika.train.pipeline import build_pipeline
from suika.train.sharded import SlicedGradients, Slices
from suika.train.stage import Stage
from suika.train.vocabulary import IGNORED


def build(spec: JobSpec, plan: Plan, rank: int, groups: RankGroups, data_path: str) -> Trainer:
    """The program of `rank` under `plan`: it has memory for its gradients, but none yet for its state.

    Raises `SpecError` for what the trainer cannot run.
    """
    check_runnable(spec, plan.layout)
    return Trainer(spec, plan, rank, groups, data_path)


class Trainer:
    """One rank: its stage of the model, its gradients, optimizer slices and data. A `runtime.program.Program`."""

    device = torch.device("cpu")

    def __init__(self, spec: JobSpec, plan: Plan, rank: int, groups: RankGroups, data_path: str) -> None:
        self.spec, self.layout, self.groups = spec, plan.layout.resolve(spec.model), groups
        self.place = Mesh(self.layout, plan.order).coordinate(rank)
        self.tp, self.pp = Axis.of("tp", groups.tp), Axis.of("pp", groups.pp)
        self.replicas = Replicas.of_groups(groups, self.layout.ep)
        self.ends = Axis.of("ends", groups.ends if spec.model.tied else None)  # only a tied embedding has two homes
        self.buckets = rank_buckets(spec.model, self.layout, spec.sequence_length, rank, plan.order)
        self.trained = tuple(bucket for bucket in self.buckets if bucket.trained)
        specs = buffer_specs(spec.model, self.layout, spec.sequence_length, spec.precision, rank, plan.order)
        self._specs = {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in specs.items()}
        self.dataset = Dataset(data_path, spec.sequence_length, spec.model.vocab, spec.seed)
        self.steps_done = self.position = 0  # optimizer steps; global samples read
        self._buffers: dict[str, Tensor] = {}
        self._begun: tuple[list[Tensor], int] | None = None  # what forward and backward of the next step gave
        self._build_stage()

    def _build_stage(self) -> None:
        spec, layout, groups = self.spec, self.layout, self.groups
        split_sequence = layout.sequence_parallel and layout.tp > 1
        self.parallel = Parallel(
            TensorParallel(self.tp, split_sequence), Axis.of("cp", groups.cp), Axis.of("ep", groups.ep)
        )
        self.stage = Stage(
            spec.model,
            layout,
            self.place,
            spec.sequence_length,
            getattr(torch, weight_dtype(spec.precision)),
            self.parallel,
        )
        shares = micro_batch_shares(spec.global_batch, layout.micro_batch, layout.dp)
        first = sum(shares[: self.place.dp]) * layout.micro_batch
        # This rank's part of each global batch, in samples.
        self._share = (first, first + shares[self.place.dp] * layout.micro_batch)
        dtype = getattr(torch, optimizer_kinds(spec.precision)["m"])
        axes = self.tp, self.replicas, self.ends, split_sequence
        self.gradients: Gradients | SlicedGradients
        self.slices: Slices | None = None
        if layout.zero == 3:
            self.gradients = SlicedGradients(self.trained, dtype, *axes)
            self.slices = Slices(self.buckets, self.replicas, self.gradients)
            self.stage.take_from(self.slices)
        else:
            self.gradients = Gradients(self.trained, dtype, *axes)
        self.pipeline = build_pipeline(self.stage, shares[self.place.dp], layout.micro_batch, self.pp)

    def buffer_specs(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        return self._specs

    def initialise(self) -> dict[str, Tensor]:
        buffers = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self._specs.items()}
        for bucket in self.buckets:
            start, stop = bucket.slice
            for tensor, at in zip(bucket.tensors, bucket.offsets, strict=True):
                box = shard_box(tensor, self.layout.tp, self.place.tp)
                shard = torch.from_numpy(initial_shard(self.spec.model, self.spec.seed, tensor, box.starts, box.stops))
                if not bucket.gathered:
                    buffers[f"weight/{tensor.name}"].copy_(shard)
                owned = shard.flatten()[max(start - at, 0) : max(stop - at, 0)]
                for sliced in (f"weight/{bucket.name}", f"master/{bucket.name}"):
                    if sliced in buffers:
                        buffers[sliced][max(at - start, 0) :][: len(owned)] = owned
        return buffers

    def bind(self, buffers: Mapping[str, Tensor]) -> None:
        for name, (shape, dtype) in self._specs.items():
            given = buffers[name]
            assert given.shape == shape, f"{name}: {tuple(given.shape)} is not {shape}"
            assert given.dtype == dtype, f"{name}: {given.dtype} is not {dtype}"
            assert given.is_contiguous(), f"{name} is not contiguous"
        self._buffers = {name: buffers[name] for name in self._specs}
        if self.slices is not None:
            self.slices.bind(buffers)
        elif isinstance(self.gradients, Gradients):
            weights = {t.name: buffers[f"weight/{t.name}"] for bucket in self.buckets for t in bucket.tensors}
            self.stage.bind(weights, self.gradients.views)
        self.optimizer = AdamW(self.spec.optimizer, self.trained, self._buffers)

    def buffers(self) -> Mapping[str, Tensor]:
        return self._buffers

    def records(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done, "position": self.position}

    def load_records(self, records: Mapping[str, Any]) -> None:
        self.steps_done, self.position = int(records["steps_done"]), int(records["position"])

    @property
    def sample_range(self) -> tuple[int, int]:
        """Global samples [start, stop) that this rank reads in the next step."""
        return self.position + self._share[0], self.position + self._share[1]

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._forward_backward()

    def step(self, votes: Sequence[float] = ()) -> StepResult:
        """One optimizer step. Raises `FloatingPointError`, on every rank and before anything changed, when the
        gradient is not finite: weights and moments are still those of the step before."""
        with span("compute"):
            self.begin()
        (losses, seen), self._begun = self._begun or ([], 0), None
        with span("reduce"):
            self.gradients.reduce()
        with span("norm"):
            loss_sum, num_tokens, square_sum, *totals = self._add_up(losses, seen, votes)
        grad_norm = square_sum**0.5 / num_tokens
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"step {self.steps_done + 1}: gradient norm {grad_norm}, loss {loss_sum / num_tokens}"
            )
        lr = learning_rate(self.spec.optimizer, self.steps_done, self.spec.steps)
        with span("optimizer"):
            self._update(num_tokens, grad_norm, lr)
        self.steps_done += 1
        self.position += self.spec.global_batch
        return StepResult(self.steps_done, loss_sum / num_tokens, grad_norm, lr, int(num_tokens), tuple(totals))

    def _forward_backward(self) -> tuple[list[Tensor], int]:
        """Fill the gradients with this rank's sums; the loss sums and the number of valid tokens it saw."""
        self.gradients.zero()
        self.stage.begin(self._masks())
        tokens = targets = None
        if self.stage.is_first or self.stage.is_last:
            samples = torch.from_numpy(self.dataset.samples(*self.sample_range))
            context = self.parallel.context(self.spec.sequence_length)
            tokens, targets = (take(part, context, 1).contiguous() for part in (samples[:, :-1], samples[:, 1:]))
        losses = self.pipeline.run(tokens, targets)
        if self.slices is not None:
            self.slices.opened.close()
        return losses, int((targets != IGNORED).sum()) if targets is not None else 0

    def _masks(self) -> tuple[Masks, ...]:
        """Dropout masks of this rank's micro-batches in the next step."""
        held = self.parallel.positions(self.spec.sequence_length)
        rate, seed = self.spec.model.dropout, self.spec.seed
        return step_masks(rate, seed, self.steps_done, range(*self.sample_range), self.layout.micro_batch, held)

    def _add_up(self, losses: list[Tensor], num_tokens: int, votes: Sequence[float]) -> list[float]:
        """Loss sum, valid tokens, squared gradient norm and votes of the whole job, in one message per axis."""
        speaks = self.stage.is_last and self.place.tp == 0  # one rank per sample
        loss_sum = float(torch.stack(losses).double().sum()) if speaks else 0.0
        mine = [loss_sum, num_tokens if speaks else 0, float(self.gradients.square_sum()), *votes]
        total = torch.tensor(mine, dtype=torch.float64)
        for axis in (self.tp, self.pp, self.replicas.dense):  # three small sums reach every rank
            total = axis.sum(total)
        return total.tolist()

    def _update(self, num_tokens: float, grad_norm: float, lr: float) -> None:
        """Average and clip the gradients, step the optimizer and hand the new weights round."""
        limit = self.spec.optimizer.clip_norm
        scale = (min(1.0, limit / grad_norm) if limit and grad_norm > 0 else 1.0) / num_tokens
        owned = [bucket.owned.mul_(scale) for bucket in self.gradients.buckets]
        self.optimizer.update(owned, self.steps_done + 1, lr)
        if isinstance(self.gradients, Gradients):
            self.optimizer.share([bucket.flat for bucket in self.gradients.buckets], self.replicas)
