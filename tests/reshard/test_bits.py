"""Bits are copied and compared wherever they lie, and a copy that went wrong is seen."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from suika.reshard import bits
from suika.reshard.bits import BLOCK_BYTES, copied, host_blocks, same_bits

ROWS = 3 * BLOCK_BYTES // (4 * 200)  # of 200 fp32: some blocks and a part of one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_bits_are_compared_wherever_they_lie(dtype: torch.dtype) -> None:
    table = torch.arange(7 * 12).reshape(7, 12).to(dtype)
    copy = table.clone()
    assert same_bits(table, copy)
    assert same_bits(table[:, 3:9], copy[:, 3:9].contiguous())
    copy[5, 4] += 1
    assert not same_bits(table, copy)
    assert not same_bits(table[:, 3:9], copy[:, 3:9].contiguous())
    assert same_bits(table[:, 5:], copy[:, 5:])
    if dtype.is_floating_point:
        table.fill_(torch.nan)
        assert same_bits(table, table.clone())
        assert not same_bits(torch.zeros(3, dtype=dtype), -torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("row", [0, ROWS // 2, ROWS - 1])
def test_one_bit_differs_in_any_block(row: int) -> None:
    table = torch.randn(ROWS, 200)
    other = table.clone()
    other.view(torch.uint8)[row, 401] ^= 4
    assert not same_bits(table, other)
    assert not same_bits(table[:, 100:], other[:, 100:])
    assert same_bits(table[:, :100], other[:, :100])


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "rows": lambda t: t[7:],
    "columns": lambda t: t[:, 31:130],
    "every other": lambda t: t[:, ::2],
    "one": lambda t: t[3, 5],
    "nothing": lambda t: t[:0],
    "deep": lambda t: t[: ROWS - ROWS % 4].view(4, -1, 200)[:, 1:, 20:],
    "one of a column": lambda t: t[3:4, 5],
}


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (ROWS, 200), (2, 1, BLOCK_BYTES // 3), (1, 2, 5, BLOCK_BYTES)])
@pytest.mark.parametrize("step", [1, 2])
def test_blocks_are_small_and_together_the_whole(shape: tuple[int, ...], step: int) -> None:
    whole = torch.randint(0, 1000, (*shape, step), dtype=torch.int16)[..., 0]
    blocks = [block for (block,) in host_blocks(whole)]
    assert all(block.nbytes <= BLOCK_BYTES for block in blocks)
    assert np.array_equal(np.concatenate([block.reshape(-1) for block in blocks]), whole.reshape(-1).numpy())


@pytest.mark.parametrize("of", CUTS)
@pytest.mark.parametrize("to", ["apart", "in place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_copy_is_exact_and_touches_nothing_else(dtype: torch.dtype, of: str, to: str) -> None:
    source = torch.randn(ROWS, 200).to(dtype)
    whole = torch.full((ROWS, 200), 7).to(dtype)
    view = CUTS[of](source)
    target = CUTS[of](whole) if to == "in place" else torch.zeros(view.shape, dtype=dtype)
    expected = whole.clone()
    if to == "in place":
        CUTS[of](expected).copy_(view)
    assert copied(target, view)
    assert same_bits(target, view)
    assert same_bits(whole, expected)


def test_a_copy_that_went_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = torch.randn(ROWS, 200), torch.empty(ROWS, 200)
    blocks = iter(range(100))

    def spoil(address: int, of: int, length: int) -> None:
        move(address, of, length)
        if next(blocks) == 1:
            ctypes.c_uint8.from_address(address + 5).value ^= 4

    def spoil_array(to: np.ndarray[Any, Any], of: np.ndarray[Any, Any]) -> None:
        to[...] = of
        if next(blocks) == 1:
            to[0, 3] += 1

    move = bits._memmove
    monkeypatch.setattr(bits, "_memmove", spoil)
    assert not copied(target, source)
    monkeypatch.undo()
    blocks = iter(range(100))
    monkeypatch.setattr(bits.np, "copyto", spoil_array)
    assert not copied(target[:, 1:], source[:, 1:])
