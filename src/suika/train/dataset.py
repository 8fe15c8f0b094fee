"""Training samples: windows of the token stream, in an order that depends on (seed, epoch) alone.

A job's position is a count of *global samples*. Which rank reads which sample follows from the position and the
layout, so a move neither loses nor repeats one. W = windows, L = sequence length.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from suika.core.errors import require
from suika.train.data import load_manifest, open_tokens
from suika.train.initial import draws, stream_key


class SampleOrder:
    """The infinite sequence of window numbers that a job trains on: each epoch visits all W windows once.

    An epoch's order sorts windows by their draw of a Philox stream keyed by (seed, epoch).
    """

    def __init__(self, num_windows: int, seed: int) -> None:
        self.num_windows, self.seed = num_windows, seed
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def epoch_of(self, position: int) -> int:
        """Epoch (from 0) of the global sample at `position`."""
        return position // self.num_windows

    def windows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Window numbers of global samples [start, stop)."""
        parts = []
        while start < stop:
            epoch, within = divmod(start, self.num_windows)
            count = min(stop - start, self.num_windows - within)
            parts.append(self._epoch_order(epoch)[within : within + count])
            start += count
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            keys = draws(stream_key("order", self.seed, epoch), 0, self.num_windows)
            self._epoch, self._order = epoch, np.argsort(keys, kind="stable")
        return self._order


class Dataset:
    """Windows of L + 1 tokens of a prepared `.bin`: window w is tokens [w L, w L + L], the last one also a target."""

    def __init__(self, data: str | Path, sequence_length: int, vocab: int, seed: int) -> None:
        self.path, self.length = Path(data), sequence_length
        manifest = load_manifest(data)
        enough = vocab >= manifest.vocab
        require(enough, "job.model.vocab", vocab, f"the data has tokens up to {manifest.vocab - 1}", "use a larger one")
        num_windows = (manifest.num_tokens - 1) // sequence_length
        fits = f"{manifest.num_tokens} tokens hold no window of sequence_length({sequence_length}) + 1"
        require(num_windows > 0, "data", str(data), fits, "use more text or shorter sequences")
        self.order = SampleOrder(num_windows, seed)

    @cached_property
    def _tokens(self) -> np.memmap:
        return open_tokens(self.path)

    def samples(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens of global samples [start, stop): (stop - start, L + 1)."""
        first = self.order.windows(start, stop)[:, None] * self.length
        return self._tokens[first + np.arange(self.length + 1)].astype(np.int64)
