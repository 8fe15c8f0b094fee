"""Fresh weights: a pure function of (seed, tensor name, element), so that every layout starts from the same model.

Element i of a tensor is made from draw i of a Philox stream keyed by (seed, name): any range can be made alone.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray
from scipy.special import ndtri

from suika.core.model import ModelSpec
from suika.core.tensors import LogicalTensor

STD = 0.02  # of every matrix; products that end a residual branch are narrowed by sqrt(2 x layers), as in GPT-2
_BLOCK = 1 << 20  # elements made at a time: bounds what is allocated beside the shard
_DRAWS_PER_COUNT = 4  # Philox4x64 gives four numbers per counter value


def stream_key(*parts: object) -> int:
    """A 128-bit Philox key from what names a stream."""
    text = "\0".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little")


def draws(key: int, start: int, count: int) -> NDArray[np.uint64]:
    """Draws [start, start + count) of the stream `key`."""
    bits = Philox(key=key)
    whole, skip = divmod(start, _DRAWS_PER_COUNT)
    bits.advance(whole)
    return bits.random_raw(skip + count)[skip:]


def normal(key: int, start: int, count: int) -> NDArray[np.float64]:
    """Standard normal elements [start, start + count) of a stream: the inverse distribution of 53-bit uniforms."""
    uniform = ((draws(key, start, count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return ndtri(uniform)


def initial_shard(
    model: ModelSpec, seed: int, tensor: LogicalTensor, starts: tuple[int, ...], stops: tuple[int, ...]
) -> NDArray[np.float64]:
    """Elements [starts, stops) of `tensor` at step 0: ones for norm weights, zeros for biases, else normal. An adapter
    changes nothing at first: its B is zero, its A spread like torch's linear layers."""
    shape = tuple(b - a for a, b in zip(starts, stops, strict=True))
    if len(tensor.shape) == 1:
        return np.ones(shape) if tensor.name.endswith("norm.weight") else np.zeros(shape)
    if tensor.name.endswith("lora_b"):
        return np.zeros(shape)
    ends_branch = tensor.name.endswith((".o.weight", ".down.weight"))
    std = STD / math.sqrt(2 * model.layers) if ends_branch else STD
    if tensor.name.endswith("lora_a"):
        std = 1 / math.sqrt(3 * tensor.shape[1])
    key, columns = stream_key("weight", seed, tensor.name), tensor.shape[1]
    shard = np.empty(shape)
    step = max(1, _BLOCK // columns)
    for row in range(starts[0], stops[0], step):
        rows = min(step, stops[0] - row)
        whole = normal(key, row * columns, rows * columns).reshape(rows, columns)
        shard[row - starts[0] :][:rows] = std * whole[:, starts[1] : stops[1]]
    return shard
