"""Bits of tensors: copied so that it is known, and compared.

In host memory both go block by block: a block that was just copied is compared while it is in the cache, so that the
proof costs a fraction of the copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

BLOCK_BYTES = 192 << 10  # of each of two tensors: both stay in a core's own cache
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # element width -> bit patterns to compare
_libc = ctypes.CDLL(None)
_memcmp, _memmove = _libc.memcmp, _libc.memmove
_memcmp.argtypes = _memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p

Block = np.ndarray[Any, np.dtype[Any]]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold the same bits (NaN included)."""
    if not (one.is_cpu and other.is_cpu):
        return torch.equal(_patterns(one), _patterns(other))
    if one.is_contiguous() and other.is_contiguous():  # several times as fast as torch.equal
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.numel() * one.element_size())
    return all(np.array_equal(a, b) for a, b in host_blocks(one, other))


def copied(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy `source` into `target`, of the same shape and dtype; whether `target` then holds its bits. No element of
    `target` shares memory with another one, or with `source`."""
    if not (target.is_cpu and source.is_cpu):
        target.copy_(source)
        return torch.equal(_patterns(target), _patterns(source))
    if target.is_contiguous() and source.is_contiguous():
        return _copied_straight(target.data_ptr(), source.data_ptr(), target.numel() * target.element_size())
    same = True
    for to, of in host_blocks(target, source):
        np.copyto(to, of)
        same = np.array_equal(to, of) and same
    return same


def host_bits(tensor: torch.Tensor) -> Block:
    """The bit patterns of a tensor in host memory: a view."""
    return _patterns(tensor).numpy()


def host_blocks(*tensors: torch.Tensor) -> Iterator[tuple[Block, ...]]:
    """The bit patterns of tensors of one shape in host memory, at most BLOCK_BYTES of each at a time, in row-major
    order."""
    return _blocks(*map(host_bits, tensors))


def _blocks(*arrays: Block) -> Iterator[tuple[Block, ...]]:
    num_bytes = arrays[0].nbytes
    if num_bytes <= BLOCK_BYTES:
        yield arrays
        return
    num_rows = len(arrays[0])
    at_once = BLOCK_BYTES * num_rows // num_bytes
    if not at_once:  # a row is longer than a block
        for rows in zip(*arrays, strict=True):
            yield from _blocks(*rows)
        return
    for first in range(0, num_rows, at_once):
        yield tuple(array[first : first + at_once] for array in arrays)


def _copied_straight(target: int, source: int, num_bytes: int) -> bool:
    same = True
    for at in range(0, num_bytes, BLOCK_BYTES):
        length = min(BLOCK_BYTES, num_bytes - at)
        _memmove(target + at, source + at, length)
        same = not _memcmp(target + at, source + at, length) and same
    return same


def _patterns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(_BITS[tensor.element_size()])
