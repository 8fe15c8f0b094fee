"""A fast 64-bit hash of tensors that notices every changed, missing or displaced element.

The bytes are read as 64-bit words w, the last padded with zeros. Each word folds its upper half into its lower one (so
that every bit reaches the bits a product keeps), is multiplied by an odd key of its column and summed over rows of
4,096 words; row sums are mixed with the row number and summed again, all modulo 2^64:

    row_r = sum_c key_c * (w_rc ^ (w_rc >> 32));    hash = sum_r mix(row_r + (r + 1) * golden) + length

A single changed word always changes its row (each step on a word is invertible); swapped words or rows collide with a
chance of about 2^-32 or less. Not for adversaries. On a CPU it runs at several GB/s per core (docs/numbers/reshard.md),
on a GPU at memory speed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch

COLUMNS = 4096
ROW_BYTES = COLUMNS * 8
ROWS_AT_ONCE = 64  # 2 MiB: stays in the cache
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1
_LOW_HALF = (1 << 32) - 1


def tensor_hash(tensor: torch.Tensor) -> int:
    """Hash of the elements of `tensor` in row-major order; equal bytes in equal places give equal hashes."""
    flat = _bytes(tensor)
    num_rows, rest = divmod(flat.numel(), ROW_BYTES)
    sums = []
    if num_rows:
        body = flat[: num_rows * ROW_BYTES]
        body = body.clone() if body.data_ptr() % 8 else body
        sums.append(_row_sums(body.view(torch.int64).view(num_rows, COLUMNS)))
    if rest:
        sums.append(_row_sums(_padded_words([flat[num_rows * ROW_BYTES :]])))
    if not sums:
        return 0
    rows = torch.cat(sums)
    numbers = torch.arange(1, len(rows) + 1, dtype=torch.int64, device=rows.device)
    return (int(_mixed(rows, numbers).sum()) + flat.numel()) & _MASK


def tensor_hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`tensor_hash` of each; small tensors of equal size are hashed together, since they come in great numbers."""
    hashes = [0] * len(tensors)
    alike: dict[int, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        num_bytes = tensor.numel() * tensor.element_size()
        if 0 < num_bytes <= ROW_BYTES:
            alike[num_bytes].append(i)
        else:
            hashes[i] = tensor_hash(tensor)
    for num_bytes, members in alike.items():
        rows = _row_sums(_padded_words([_bytes(tensors[i]) for i in members]))
        mixed = _mixed(rows, torch.ones_like(rows))
        for i, value in zip(members, mixed.tolist(), strict=True):
            hashes[i] = (value + num_bytes) & _MASK
    return hashes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _padded_words(rows: list[torch.Tensor]) -> torch.Tensor:
    """Byte rows of one length as rows of 64-bit words."""
    num_bytes = rows[0].numel()
    padded = torch.zeros((len(rows), -(-num_bytes // 8) * 8), dtype=torch.uint8, device=rows[0].device)
    padded[:, :num_bytes] = torch.stack(rows)
    return padded.view(torch.int64)


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """Keyed sums of rows of at most COLUMNS words (absent words count as zeros)."""
    keys = _keys(rows.device)[: rows.shape[1]]
    sums = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    scratch = torch.empty((min(ROWS_AT_ONCE, len(rows)), rows.shape[1]), dtype=torch.int64, device=rows.device)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        block = rows[first : first + ROWS_AT_ONCE]
        part = scratch[: len(block)]
        torch.bitwise_right_shift(block, 32, out=part)  # arithmetic: the mask makes it logical, hence invertible
        part.bitwise_and_(_LOW_HALF).bitwise_xor_(block).mul_(keys)
        torch.sum(part, dim=1, out=sums[first : first + len(block)])
    return sums


def _mixed(sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Row sums, each finalised by xor-shift-multiply together with its row number."""
    x = sums + numbers * _signed(_GOLDEN)
    for shift, factor in _FACTORS:
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * _signed(factor)
    return x ^ ((x >> 31) & (_MASK >> 31))


@cache
def _keys(device: torch.device) -> torch.Tensor:
    """Odd 64-bit keys, the same everywhere: mixed column numbers."""
    columns = torch.arange(1, COLUMNS + 1, dtype=torch.int64)
    return (_mixed(torch.zeros_like(columns), columns) | 1).to(device)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
