"""Dropout masks are the same in every layout: whole runs against one process, and the masks themselves (B17)."""

from __future__ import annotations

import hashlib
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from logical import train_from
from ranks import run_ranks
from test_reference import attention, linear, mlp, norm
from twins import TIMEOUT_S, gpt, job, llama, max_loss_difference, plan_of, run, text, trainer, twin

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.core.tensors import logical_tensors
from suika.runtime.program import RankGroups
from suika.train.masks import Masks
from suika.train.program import build

RATE = 0.1


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (gpt(dropout=RATE), Layout(tp=2, micro_batch=4)),
        (llama(dropout=RATE, layers=3), Layout(tp=2, micro_batch=2, sequence_parallel=True, recompute="full")),
        (gpt(dropout=RATE), Layout(dp=3, pp=2)),
        (llama(dropout=RATE, layers=3), Layout(tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True)),
    ],
    ids=lambda value: value.family if isinstance(value, ModelSpec) else str(value),
)
def test_losses_are_those_of_one_process(model: ModelSpec, layout: Layout) -> None:
    spec = job(model)
    assert max_loss_difference(run(spec, layout, 5), twin(spec, 5)) < 1e-9


def test_moves_keep_the_masks_and_one_dropped_mask_would_be_noticed() -> None:
    """B17: TP2 x PP2 x DP2, to the same layout, then tp 1, then tp 4; and another seed gives other losses."""
    spec = job(llama(dropout=RATE, kv_heads=4), steps=8)
    layout = Layout(tp=2, pp=2, dp=2, micro_batch=2)
    state, records, results = None, None, []
    for to in (layout, layout, Layout(dp=2), Layout(tp=4, micro_batch=8, sequence_parallel=True)):
        state, records, some = train_from(spec, to, 2, state, records)
        results += some
    assert max_loss_difference(results, twin(spec, 8)) < 1e-9
    other = job(llama(kv_heads=4), steps=8)
    assert max_loss_difference(twin(other, 8), twin(spec, 8)) > 1e-3


def expected_mask(seed: int, step: int, sample: int, site: str, length: int, hidden: int) -> np.ndarray:
    """What is kept of (L, D), by the rule written out once more: 32 bits of Philox4x64 per element, low half first."""
    name = "\0".join(map(str, ("dropout", seed, step, sample, site)))
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    words = np.random.Philox(key=key).random_raw(-(-length * hidden // 2))
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], -1).reshape(-1)[: length * hidden]
    return (halves >= RATE * 2.0**32).reshape(length, hidden)


@pytest.mark.parametrize("model", [gpt(layers=2, dropout=RATE), llama(layers=2, dropout=RATE)], ids=lambda m: m.family)
def test_the_loss_is_that_of_textbook_pytorch_with_the_same_masks(model: ModelSpec) -> None:
    spec = job(model)
    program = build(spec, plan_of(Layout()), 0, RankGroups(None, None, None, None, None), text())
    fresh = program.initialise()
    p = {t.name: fresh[f"weight/{t.name}"] for t in logical_tensors(model, spec.sequence_length)}
    samples = torch.from_numpy(program.dataset.samples(0, spec.global_batch))

    def drop(x: torch.Tensor, site: str) -> torch.Tensor:
        keep = [expected_mask(spec.seed, 0, i, site, x.shape[1], x.shape[2]) for i in range(spec.global_batch)]
        return torch.where(torch.from_numpy(np.stack(keep)), x / (1 - RATE), 0)

    x = p["embedding.weight"][samples[:, :-1]]
    if model.family == "gpt":
        x = x + p["positions.weight"][: spec.sequence_length]
    x = drop(x, "embedding")
    for layer in ("layers.0", "layers.1"):
        for branch, function in (("attention", attention), ("mlp", mlp)):
            site = f"{layer}.{branch}"
            x = x + drop(function(model, p, site, norm(model, p, f"{site}_norm", x)), site)
    head = {"head.weight": p["embedding.weight" if model.tied else "head.weight"]}
    out = linear(head, "head", norm(model, p, "final_norm", x))
    expected = F.cross_entropy(out.flatten(0, 1), samples[:, 1:].flatten())
    assert twin(spec, 5)[0].loss == pytest.approx(expected.item(), abs=1e-10)


@given(st.data())
def test_parts_of_a_mask_are_parts_of_the_whole(data: st.DataObject) -> None:
    """Any division of a sequence into runs of positions, odd widths included."""
    length, hidden = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7))
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
    runs = data.draw(st.permutations([slice(a, b) for a, b in pairwise(cuts)]))
    x = torch.arange(1.0, length * hidden + 1).reshape(1, length, hidden).repeat(2, 1, 1)
    held = torch.cat([x[:, part] for part in runs], 1)
    whole = Masks(RATE, 5, 7, (11, 12), (slice(0, length),)).drop(x, "layers.0.mlp")
    parts = Masks(RATE, 5, 7, (11, 12), runs).drop(held, "layers.0.mlp")
    assert torch.equal(parts, torch.cat([whole[:, part] for part in runs], 1))
    kept = np.stack([expected_mask(5, 7, s, "layers.0.mlp", length, hidden) for s in (11, 12)])
    assert np.array_equal(whole.numpy() != 0, kept)


def test_no_two_streams_are_alike_and_the_rate_is_kept() -> None:
    """B17: all of (step, sample, site) pairwise different, about independent; a tenth is dropped; the mean stays."""
    ones = torch.ones(1, 64, 64)
    masks = {
        (step, sample, site): Masks(RATE, 3, step, (sample,), (slice(0, 64),)).drop(ones, site)
        for step in (0, 1)
        for sample in (0, 8)
        for site in ("embedding", "layers.0.attention", "layers.0.mlp", "layers.10.mlp")
    }
    for x in masks.values():
        assert abs(float((x == 0).double().mean()) - RATE) < 0.02
        assert abs(float(x.mean()) - 1) < 0.03
    for one, other in combinations(masks.values(), 2):
        assert abs(float(((one == 0) & (other == 0)).double().mean()) - RATE**2) < 0.01


def test_which_ranks_agree_on_a_mask() -> None:
    """Ranks of a tp group drop the same where they hold the same; shards of positions and dp ranks drop apart."""
    spec = job(llama(layers=1, dropout=0.5))
    text()

    def masks_of(layout: Layout) -> list[np.ndarray]:
        def body(rank: int, store: dist.Store) -> np.ndarray:
            (masks, *_) = trainer(spec, layout, rank, store)._masks()
            held = masks.positions[0]
            return masks.drop(torch.ones(layout.micro_batch, held.stop - held.start, 32), "layers.0.mlp").numpy()

        return run_ranks(layout.num_ranks, body, TIMEOUT_S)

    first, second, third, fourth = masks_of(Layout(tp=2, dp=2, micro_batch=2))
    assert np.array_equal(first, second)
    assert np.array_equal(third, fourth)
    assert not np.array_equal(first, third)
    left, right, *_ = masks_of(Layout(tp=2, dp=2, micro_batch=2, sequence_parallel=True))
    assert np.array_equal(np.concatenate([left, right], 1), first)
    assert not np.array_equal(left, right)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(SpecError, match=r"model\.dropout"):
        job(llama(dropout=rate))
