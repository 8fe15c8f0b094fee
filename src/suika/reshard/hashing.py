"""64-bit hashes of tensors that notice every changed, missing or displaced element. Not for adversaries.

In host memory it is XXH3 of the elements' bytes in row-major order, which runs as fast as memory is read. On a device,
where no such thing exists, the bytes are read as 64-bit words w, the last padded with zeros, in rows of 4,096, and each
row is summed twice with odd keys of its columns: its words, and the words that begin four bytes later. What lies in the
upper half of a word, where a product would push it out, lies in the lower half of its neighbour. Row sums are mixed
with the row number and summed again, all modulo 2^64:

    low_r = sum_c a_c * w_rc;    high_r = sum_c b_c * (upper half of w_rc + 2^32 * lower half of w_r(c+1))
    hash = sum_r mix(low_r + mix(high_r) + (r + 1) * golden) + length

A single changed word always changes `low` of its row (its key is odd); that `high` undoes it, or that swapped words or
rows go unnoticed, has a chance of about 2^-32 or less. All of a move's participants use the same of the two: keyed sums
if any of them has its state on a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import xxhash

from suika.reshard.bits import host_bits, host_blocks

COLUMNS = 4096
ROW_BYTES = COLUMNS * 8
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MASK = (1 << 64) - 1
_LOW_HALF = (1 << 32) - 1


def host_hash(tensor: torch.Tensor) -> int:
    """XXH3 of the bytes of `tensor`, which is in host memory, in row-major order."""
    if tensor.is_contiguous():
        return xxhash.xxh3_64_intdigest(host_bits(tensor).data)
    hasher = xxhash.xxh3_64()
    for (block,) in host_blocks(tensor):
        hasher.update(block.copy().data)  # its rows, drawn together in the cache
    return hasher.intdigest()


def tensor_hashes(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Keyed sums of the elements of each tensor in row-major order, wherever they are."""
    return finished([row_sums(tensors)])


class RowSums(NamedTuple):
    """All that is needed of some tensors' bytes. `sums`: (2, its number of rows), in pieces; `owners`, `numbers`: of
    each row, its tensor and its place in it, from 1; `lengths`: bytes of each tensor."""

    sums: list[torch.Tensor]
    owners: list[int]
    numbers: list[int]
    lengths: list[int]


def row_sums(tensors: Sequence[torch.Tensor]) -> RowSums:
    """The part of `tensor_hashes` that reads the tensors. Rests of one length are summed together, since small tensors
    come in great numbers."""
    flat = [_bytes(tensor) for tensor in tensors]
    alike: dict[int, list[int]] = defaultdict(list)
    sums: list[torch.Tensor] = []
    owners: list[int] = []
    numbers: list[int] = []
    for i, data in enumerate(flat):
        num_rows, rest = divmod(data.numel(), ROW_BYTES)
        if rest:
            alike[rest].append(i)
        if num_rows:
            body = data[: num_rows * ROW_BYTES]
            body = body.clone() if body.data_ptr() % 8 else body
            sums.append(_row_sums(body.view(torch.int64).view(num_rows, COLUMNS)))
            owners += [i] * num_rows
            numbers += range(1, num_rows + 1)
    for rest, members in alike.items():
        sums.append(_row_sums(_padded_words([flat[i][-rest:] for i in members])))
        owners += members
        numbers += [flat[i].numel() // ROW_BYTES + 1 for i in members]
    return RowSums(sums, owners, numbers, [data.numel() for data in flat])


def finished(many: Sequence[RowSums]) -> list[int]:
    """The hashes of all their tensors, in order: all rows are mixed at once."""
    lengths = [length for one in many for length in one.lengths]
    sums = [part for one in many for part in one.sums]
    if not sums:
        return [0] * len(lengths)
    starts = accumulate((len(one.lengths) for one in many), initial=0)
    owners = [start + owner for start, one in zip(starts, many, strict=False) for owner in one.owners]
    low, high = torch.cat(sums, dim=1)
    where = torch.tensor([owners, [number for one in many for number in one.numbers]], device=low.device)
    mixed = _mixed(low + _mixed(high, torch.zeros_like(high)), where[1])
    totals = torch.zeros(len(lengths), dtype=torch.int64, device=low.device).index_add_(0, where[0], mixed)
    return [(total + length) & _MASK for total, length in zip(totals.tolist(), lengths, strict=True)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # one has any stride


def _padded_words(rows: list[torch.Tensor]) -> torch.Tensor:
    """Byte rows of one length as rows of 64-bit words."""
    num_bytes = rows[0].numel()
    padded = torch.zeros((len(rows), -(-num_bytes // 8) * 8), dtype=torch.uint8, device=rows[0].device)
    padded[:, :num_bytes] = torch.stack(rows)
    return padded.view(torch.int64)


def _row_sums(rows: torch.Tensor) -> torch.Tensor:
    """(2, number of rows): both keyed sums of rows of at most COLUMNS words; absent words count as zeros."""
    low_keys, high_keys = (keys[: rows.shape[1]] for keys in _keys(rows.device))
    later = (rows >> 32) & _LOW_HALF
    later[:, :-1] |= rows[:, 1:] << 32
    return torch.stack([torch.sum(rows * low_keys, dim=1), torch.sum(later * high_keys, dim=1)])


def _mixed(sums: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Row sums, each finalised by xor-shift-multiply together with its row number."""
    x = sums + numbers * _signed(_GOLDEN)
    for shift, factor in _FACTORS:
        x = (x ^ ((x >> shift) & (_MASK >> shift))) * _signed(factor)
    return x ^ ((x >> 31) & (_MASK >> 31))


@cache
def _keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Odd 64-bit keys, the same everywhere: mixed column numbers."""
    columns = torch.arange(1, 2 * COLUMNS + 1, dtype=torch.int64)
    keys = (_mixed(torch.zeros_like(columns), columns) | 1).to(device)
    return keys[:COLUMNS], keys[COLUMNS:]


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
