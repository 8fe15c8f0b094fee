"""`Stage`: the part of the model that one rank runs, as a skeleton whose parameters are bound to given buffers.

A stage is one `Chunk` of consecutive layers, or several with interleaved (virtual) pipeline stages.

Parameters carry the names of `logical_tensors`: `layers.3.attention.q.weight` is that tensor on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from suika.core.layout import Layout
from suika.core.mesh import Coordinate
from suika.core.model import ModelSpec
from suika.core.tensors import LogicalTensor, logical_tensors
from suika.train.blocks import Block, Norm, Weights, rotary_tables
from suika.train.experts import MixtureBlock
from suika.train.masks import Masks
from suika.train.parallel import Parallel, take
from suika.train.sharded import Slices, Use
from suika.train.vocabulary import embed, token_losses


class Stage:
    """All chunks of one rank, in model order."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        place: Coordinate,
        sequence_length: int,
        dtype: torch.dtype,
        parallel: Parallel,
    ) -> None:
        bounds = layout.stage_chunks(model, place.pp)
        if layout.pp == 1:  # its chunks follow each other: nothing passes between them
            bounds = ((0, model.layers),)
        self.chunks = tuple(Chunk(model, layout, place, bound, sequence_length, dtype, parallel) for bound in bounds)

    @property
    def is_first(self) -> bool:
        return self.chunks[0].is_first

    @property
    def is_last(self) -> bool:
        return self.chunks[-1].is_last

    def bind(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """Make `weights` the live parameters, without a copy; backward adds into `grads`, which may be wider. What
        has none is frozen."""
        for chunk in self.chunks:
            chunk.bind({name: weight for name, weight in weights.items() if chunk.has(name)}, grads)

    def take_from(self, slices: Slices) -> None:
        """Instead of `bind`: weights are whole only while they are used (ZeRO 3)."""
        for chunk in self.chunks:
            chunk.take_from(slices)

    def begin(self, masks: Sequence[Masks]) -> None:
        """Start a step: the masks of its micro-batches, which go through each chunk in this order."""
        for chunk in self.chunks:
            chunk.begin(masks)

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (B, L) -> local logits (B, L, V), where there is one stage."""
        (chunk,) = self.chunks
        return chunk(ids)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the token losses of a micro-batch; last stage only."""
        return self.chunks[-1].loss(logits, targets)


class Chunk(nn.Module):
    """Layers [first, last) of a model on one tensor-parallel rank, with the embedding or the head at the ends.

    Holds no storage until `bind`. B = batch, L = this rank's context of a sequence, D = hidden, V = local rows of the
    vocabulary.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        place: Coordinate,
        bounds: tuple[int, int],
        sequence_length: int,
        dtype: torch.dtype,
        parallel: Parallel,
    ) -> None:
        super().__init__()
        self.tp, self.hidden, self.dtype = parallel.tp, model.hidden, dtype
        self.length, self.held = sequence_length // parallel.cp.size, parallel.positions(sequence_length)
        first, last = bounds
        self.is_first, self.is_last, self.tied = first == 0, last == model.layers, model.tied
        table = logical_tensors(model, sequence_length)[0]
        self.first_row, stop = table.bounds(layout.tp, place.tp)
        self.num_rows = stop - self.first_row
        if self.is_first or (self.is_last and model.tied):
            self.embedding = Weights()
        if self.is_first and model.family == "gpt":
            self.positions = Weights()
        self.layers = nn.ModuleDict(
            {
                str(i): (MixtureBlock if model.is_moe_layer(i) else Block)(model, i, parallel, layout.recompute)
                for i in range(first, last)
            }
        )
        if self.is_last:
            self.final_norm = Norm(model)
            if not model.tied:
                self.head = Weights()
        self.rotary: tuple[Tensor, Tensor] | None = None
        if model.family == "llama":
            cos, sin = rotary_tables(sequence_length, model.head_dim, model.rope_theta, dtype)
            context = parallel.context(sequence_length)
            self.rotary = take(cos, context, 0), take(sin, context, 0)
        self._masks: Iterator[Masks] = iter(())
        self._uses: dict[str, Use] = {}  # ZeRO 3

    def has(self, name: str) -> bool:
        """Whether the tensor called `name` is a parameter of this chunk."""
        try:
            self.get_submodule(name.rpartition(".")[0])
        except AttributeError:
            return False
        return True

    def bind(self, weights: Mapping[str, Tensor], grads: Mapping[str, Tensor]) -> None:
        """As `Stage.bind`, for the chunk's own tensors."""
        for name, weight in weights.items():
            holder, _, leaf = name.rpartition(".")
            grad = grads.get(name)
            parameter = nn.Parameter(weight, requires_grad=grad is not None)
            if grad is not None and weight.dtype == grad.dtype:
                parameter.grad = grad
            elif grad is not None:
                parameter.register_post_accumulate_grad_hook(_adder(grad))
            setattr(self.get_submodule(holder), leaf, parameter)

    def take_from(self, slices: Slices) -> None:
        """As `Stage.take_from`."""
        for number, block in self.layers.items():
            assert isinstance(block, Block)
            block.use = slices.use(self, partial(_in_layer, int(number)))
        if self.is_first:
            self._uses["embedding"] = slices.use(self, lambda t: t.place == "embedding")
        if self.is_last:
            table = "embedding.weight" if self.tied else ""
            self._uses["head"] = slices.use(self, lambda t: t.place == "head" or t.name == table)

    def boundary(self, micro_batch: int) -> Tensor:
        """A shape-only example of what passes between chunks: (B, L or L/tp, D)."""
        positions = self.tp.positions(self.length)
        shape = (micro_batch, positions.stop - positions.start, self.hidden)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def logits_example(self, micro_batch: int) -> Tensor:
        """A shape-only example of what the last chunk gives: (B, L, V)."""
        shape = (micro_batch, self.length, self.num_rows)
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def begin(self, masks: Iterable[Masks]) -> None:
        """As `Stage.begin`."""
        self._masks = iter(masks)

    def forward(self, x: Tensor) -> Tensor:
        """Token ids (B, L) or activations of the chunk before -> activations, or local logits (B, L, V)."""
        masks = next(self._masks)
        if self.is_first:
            x = masks.drop(self._with("embedding", self._embed, x), "embedding")
        for block in self.layers.values():
            x = block(x, self.rotary, masks)
        if self.is_last:
            x = self._with("head", self._logits, x)
        # Nothing up to here is trained: the schedule will bring a gradient nonetheless, and it ends here.
        return x if x.requires_grad else x.requires_grad_()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sum of the token losses of a micro-batch; last chunk only."""
        return token_losses(logits, targets, self.first_row, self.tp.axis).sum()

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.tp.leave(embed(ids, self.embedding.weight, self.first_row, self.tp.axis))
        if hasattr(self, "positions"):
            x = x + take(self.positions.weight, self.held, 0)
        return x

    def _logits(self, x: Tensor) -> Tensor:
        x = self.tp.enter(self.final_norm(x))
        return F.linear(x, (self.embedding if self.tied else self.head).weight)

    def _with(self, name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """`function(x)`, with its weights in place where they come and go."""
        use = self._uses.get(name)
        return function(x) if use is None else use.during(function, x)


def _in_layer(layer: int, tensor: LogicalTensor) -> bool:
    return tensor.layer == layer


def _adder(wide: Tensor) -> Callable[[Tensor], None]:
    """Adds a narrow gradient into a wide one as soon as backward has made it, and drops it."""

    def add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        wide.add_(parameter.grad)
        parameter.grad = None

    return add
