"""Both hashes see every change of place and value, whatever the dtype, wherever the elements lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.reshard.bits import BLOCK_BYTES
from suika.reshard.hashing import ROW_BYTES, host_hash, tensor_hashes

Hash = Callable[[torch.Tensor], int]


def keyed_sums(tensor: torch.Tensor) -> int:
    return tensor_hashes([tensor])[0]


@pytest.fixture(params=[host_hash, keyed_sums], ids=["host", "device"])
def hashed(request: pytest.FixtureRequest) -> Hash:
    chosen: Hash = request.param
    return chosen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int16, torch.uint8])
@pytest.mark.parametrize("numel", [2, 7, 100, 40_000])
def test_swapped_or_changed_elements_change_the_hash(hashed: Hash, dtype: torch.dtype, numel: int) -> None:
    """Even powers of two, whose bits lie where plain multiplication would lose them."""
    tensor = (2.0 ** (torch.arange(numel) % 7)).to(dtype)
    seen = {hashed(tensor)}
    for i, j in [(0, 1), (0, numel - 1), (numel // 2, numel - 1)]:
        swapped = tensor.clone()
        swapped[[i, j]] = tensor[[j, i]]
        assert (hashed(swapped) in seen) == torch.equal(swapped, tensor)
    for bit in range(8):
        flipped = tensor.clone()
        flipped.view(torch.uint8)[-1] ^= 1 << bit
        seen.add(hashed(flipped))
    assert len(seen) == 9


def test_rows_and_lengths_matter(hashed: Hash) -> None:
    row = torch.arange(ROW_BYTES // 8)
    assert hashed(torch.cat([row, row + 1])) != hashed(torch.cat([row + 1, row]))
    assert len({hashed(torch.zeros(n, dtype=torch.uint8)) for n in (0, 1, 7, 8, ROW_BYTES, ROW_BYTES + 1)}) == 6


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=8), st.integers(0, 1000))
def test_small_tensors_hashed_together_hash_as_alone(sizes: list[tuple[int, int]], seed: int) -> None:
    torch.manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.uint8, torch.float64)
    tensors = [torch.randint(0, 100, (n, 3)).to(dtypes[d])[:, 1:] for d, n in sizes]
    assert tensor_hashes(tensors) == [keyed_sums(t) for t in tensors]


def test_a_view_hashes_as_its_copy(hashed: Hash) -> None:
    whole = torch.randn(70, 300)
    views = [whole[:, 1:], whole[3:, 7:11], whole.view(torch.uint8).view(-1)[3:], whole[:, ::2], whole[0, 0], whole[:0]]
    views.append(whole[3:4, 5])  # one element, and the next would be a row further
    for view in views:
        assert hashed(view) == hashed(view.clone(memory_format=torch.contiguous_format))


def test_a_large_view_hashes_as_its_copy_block_by_block(hashed: Hash) -> None:
    """Rows of many blocks, rows longer than a block, and more dimensions than two."""
    for shape in ((3 * BLOCK_BYTES // 400, 203), (3, BLOCK_BYTES // 2), (5, 40, 700)):
        view = torch.randn(shape)[..., 1:]
        assert hashed(view) == hashed(view.contiguous())
        changed = view.clone()
        changed[-1, ..., -1] += 1
        assert hashed(changed) != hashed(view)
