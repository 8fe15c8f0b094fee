"""B07: fp32 masters that bf16 cannot hold go through moves as they are, and the model's weights stay their rounding."""

from __future__ import annotations

import numpy as np
import torch
from logical import State, same_bits, train_from
from twins import job, llama

from suika.core.layout import Layout
from suika.reshard.state import StateKey

PATH = [Layout(tp=2), Layout(pp=2), Layout(dp=3), Layout(tp=2, dp=2), Layout(dp=2, zero_buckets="stage"), Layout()]
BETWEEN = 1 + 2.0**-12  # bf16 has 8 bits


def _rounded(master: np.ndarray) -> np.ndarray:
    """As bf16, in the form in which `logical` keeps it."""
    return torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy()


def _check(state: State) -> None:
    for (tensor, kind), values in state.items():
        assert values.dtype == (np.int16 if kind == "weight" else np.float32), (tensor, kind)
        if kind == "weight":
            assert np.array_equal(values, _rounded(state[StateKey(tensor, "master")])), tensor


def test_b07_masters_keep_what_bf16_cannot_hold() -> None:
    spec = job(llama(layers=2), "bf16", steps=40)
    spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"lr": 1e-7, "weight_decay": 0.0})})
    state, records, _ = train_from(spec, Layout(), 1)
    for key, values in state.items():
        if key.kind == "master":
            values.fill(BETWEEN)
            state[StateKey(key.tensor, "weight")][...] = _rounded(values)
    first = {key: values.copy() for key, values in state.items()}
    for layout in PATH:
        state, records, _ = train_from(spec, layout, 1, state, records)
        _check(state)
    for key, values in state.items():
        if key.kind == "master":
            assert np.abs(values - BETWEEN).max() < 1e-5, "rebuilt from bf16: that would be 1"
        if key.kind == "weight":
            assert np.array_equal(values, first[key]), "steps this small do not show in bf16"


def test_b07_the_same_layout_loses_no_bit() -> None:
    spec = job(llama(layers=2), "bf16", steps=40)
    state, records, _ = train_from(spec, Layout(dp=2), 1)
    for _ in range(4):
        state, records, _ = train_from(spec, Layout(dp=2), 1, state, records)
    unmoved, _, _ = train_from(spec, Layout(dp=2), 5)
    assert same_bits(state, unmoved)
