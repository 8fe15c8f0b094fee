"""The hash sees every change of place and value, whatever the dtype, and costs little."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.reshard.hashing import ROW_BYTES, tensor_hash, tensor_hashes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.uint8])
@pytest.mark.parametrize("numel", [2, 7, 100, 40_000])
def test_swapped_or_changed_elements_change_the_hash(dtype: torch.dtype, numel: int) -> None:
    """Even powers of two, whose bits lie where plain multiplication would lose them."""
    tensor = (2.0 ** (torch.arange(numel) % 7)).to(dtype)
    seen = {tensor_hash(tensor)}
    for i, j in [(0, 1), (0, numel - 1), (numel // 2, numel - 1)]:
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        assert (tensor_hash(swapped) in seen) == torch.equal(swapped, tensor)
    for bit in range(8):
        flipped = tensor.clone()
        flipped.view(torch.uint8)[-1] ^= 1 << bit
        seen.add(tensor_hash(flipped))
    assert len(seen) == 9


def test_rows_and_lengths_matter() -> None:
    row = torch.arange(ROW_BYTES // 8)
    assert tensor_hash(torch.cat([row, row + 1])) != tensor_hash(torch.cat([row + 1, row]))
    assert len({tensor_hash(torch.zeros(n, dtype=torch.uint8)) for n in (0, 1, 7, 8, ROW_BYTES, ROW_BYTES + 1)}) == 6


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=8), st.integers(0, 1000))
def test_small_tensors_hashed_together_hash_as_alone(sizes: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
    tensors = [torch.randint(0, 100, (n, 3)).to(dtypes[d])[:, 1:] for d, n in sizes]
    assert tensor_hashes(tensors) == [tensor_hash(t) for t in tensors]


def test_a_view_hashes_as_its_copy() -> None:
    whole = torch.randn(70, 300)
    for view in (whole[:, 1:], whole[3:, 7:11], whole.view(torch.uint8).view(-1)[3:]):
        assert tensor_hash(view) == tensor_hash(view.clone())
