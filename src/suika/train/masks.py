"""Dropout masks: a pure function of (seed, step, global sample, site, element), so they are the same in every layout.

Shapes: B = batch, l = positions of a sequence that this rank holds, D = hidden. A site is a place in the model
(`embedding`, `layers.3.mlp`); element i of a sample's mask, counted over the whole (L, D), is 32 bits of a Philox
stream keyed by everything else. A rank draws just its own positions, and again when it recomputes: nothing is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from suika.train.initial import draws, stream_key

_PER_DRAW = 2  # a draw has 64 bits, an element takes 32


@dataclass(frozen=True)
class Masks:
    """The masks of one micro-batch on a rank that holds `positions` of each sequence. `rate`: share that is dropped."""

    rate: float
    seed: int
    step: int
    samples: Sequence[int]  # global numbers; none is ever used twice
    positions: Sequence[slice]

    def drop(self, x: Tensor, site: str) -> Tensor:
        """`x` (B, l, D) without the elements that `site` drops, the others scaled up to keep the mean."""
        if not self.rate:
            return x
        dropped = torch.from_numpy(np.stack([self._dropped(sample, site, x.shape[-1]) for sample in self.samples]))
        return x.masked_fill(dropped.to(x.device), 0.0) * (1 / (1 - self.rate))

    def _dropped(self, sample: int, site: str, hidden: int) -> NDArray[np.bool_]:
        """(l, D) of one sample."""
        key = stream_key("dropout", self.seed, self.step, sample, site)
        least_kept = np.uint32(min(math.ceil(self.rate * 2.0**32), 2**32 - 1))
        parts = [_words(key, p.start * hidden, (p.stop - p.start) * hidden) for p in self.positions]
        return (np.concatenate(parts) < least_kept).reshape(-1, hidden)


def step_masks(
    rate: float, seed: int, step: int, samples: Sequence[int], micro_batch: int, positions: Sequence[slice]
) -> tuple[Masks, ...]:
    """The masks of each micro-batch of a step, in the order in which they go forward."""
    starts = range(0, len(samples), micro_batch)
    return tuple(Masks(rate, seed, step, samples[at : at + micro_batch], positions) for at in starts)


def _words(key: int, start: int, count: int) -> NDArray[np.uint32]:
    """32-bit words [start, start + count) of a stream."""
    first, skip = divmod(start, _PER_DRAW)
    num_draws = -(-(skip + count) // _PER_DRAW)
    return draws(key, first, num_draws).astype("<u8", copy=False).view("<u4")[skip : skip + count]
