"""AdamW on slices against torch's own, and fresh weights that do not depend on the layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from twins import gpt, job, llama

from suika.core.job import OptimizerSpec
from suika.core.layout import Layout
from suika.core.tensors import logical_tensors
from suika.reshard.state import buffer_specs, rank_buckets, shard_box
from suika.train.initial import draws, initial_shard, normal, stream_key
from suika.train.optimizer import AdamW, learning_rate


def test_slices_are_updated_as_torch_updates_whole_tensors() -> None:
    """Three ZeRO ranks against torch.optim.AdamW with two parameter groups, 20 steps, fp64."""
    spec, layout = job(llama(layers=2)), Layout(dp=3)
    tensors = logical_tensors(spec.model, spec.sequence_length)
    draw = np.random.default_rng(0)
    weights = {t.name: torch.from_numpy(draw.normal(size=t.shape)) for t in tensors}
    reference = {name: torch.nn.Parameter(w.clone()) for name, w in weights.items()}
    settings = OptimizerSpec(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    groups = [
        {"params": [reference[t.name] for t in tensors if t.decay], "weight_decay": 0.3},
        {"params": [reference[t.name] for t in tensors if not t.decay], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.9), eps=1e-6)
    ours, buckets = [], []
    for rank in range(3):
        buckets = rank_buckets(spec.model, layout, spec.sequence_length, rank)
        specs = buffer_specs(spec.model, layout, spec.sequence_length, spec.precision, rank)
        buffers = {name: torch.zeros(shape, dtype=torch.float64) for name, (shape, _) in specs.items()}
        for name, weight in weights.items():
            buffers[f"weight/{name}"] = weight  # shared: each rank updates its slice of it
        ours.append((AdamW(settings, buckets, buffers), buckets))
    for step in range(1, 21):
        grads = {t.name: torch.from_numpy(draw.normal(size=t.shape)) for t in tensors}
        for name, parameter in reference.items():
            parameter.grad = grads[name]
        theirs.step()
        for optimizer, buckets in ours:
            flats = [torch.cat([grads[t.name].flatten() for t in b.tensors])[slice(*b.slice)].clone() for b in buckets]
            optimizer.update(flats, step, 1e-2)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, reference[name].detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_learning_rate_curves(decay: str) -> None:
    spec = OptimizerSpec(lr=1.0, warmup_steps=10, decay=decay, decay_steps=110, min_lr_ratio=0.1)  # type: ignore[arg-type]
    rates = [learning_rate(spec, step, 1000) for step in range(200)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    middle = {"constant": 1.0, "linear": 0.55, "cosine": 0.55}[decay]
    assert rates[60] == pytest.approx(middle)
    assert rates[150] == pytest.approx(1.0 if decay == "constant" else 0.1)


@pytest.mark.parametrize("model", [gpt(vocab=263), llama(vocab=263, tied=True)], ids=lambda m: m.family)
def test_fresh_weights_are_cuts_of_the_same_tensors(model) -> None:  # type: ignore[no-untyped-def]
    for tensor in logical_tensors(model, 16):
        whole = initial_shard(model, 11, tensor, (0,) * len(tensor.shape), tensor.shape)
        for tp in (2, 4):
            for rank in range(tp):
                box = shard_box(tensor, tp, rank)
                inside = tuple(slice(a, b) for a, b in zip(box.starts, box.stops, strict=True))
                assert np.array_equal(initial_shard(model, 11, tensor, box.starts, box.stops), whole[inside])


def test_fresh_weights_differ_by_seed_and_name_and_are_normal() -> None:
    a, b = normal(stream_key("weight", 1, "x"), 0, 100_000), normal(stream_key("weight", 2, "x"), 0, 100_000)
    assert abs(a.mean()) < 0.02
    assert abs(a.std() - 1) < 0.01
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    assert not np.array_equal(a, normal(stream_key("weight", 1, "y"), 0, 100_000))


def test_any_range_of_a_stream_can_be_drawn_alone() -> None:
    key = stream_key("any")
    whole = draws(key, 0, 1000)
    for start, count in ((0, 1), (1, 3), (3, 2), (4, 4), (997, 3), (17, 900)):
        assert np.array_equal(draws(key, start, count), whole[start : start + count])
