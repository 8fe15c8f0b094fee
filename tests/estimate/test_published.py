"""A published family that no constant was chosen on: Narayanan et al., SC'21 (arXiv 2104.04473), table 1.

GPT from 1.7 B to 1 T on 32 to 3,072 A100 with full recompute. The paper gives achieved TFLOP/s by its own formula, from
which the iteration time follows; not the micro-batch nor the chunks of interleaved runs: the best are taken.
"""

from __future__ import annotations

import statistics

import pytest

from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.estimate.predict import estimate_step
from suika.estimate.recipes import MEGATRON_UNFUSED

VOCAB, LENGTH = 51200, 2048
# heads, hidden, layers, tp, pp, devices, global batch, achieved TFLOP/s per device
TABLE = (
    (24, 2304, 24, 1, 1, 32, 512, 137),
    (32, 3072, 30, 2, 1, 64, 512, 138),
    (32, 4096, 36, 4, 1, 128, 512, 142),
    (48, 6144, 40, 8, 1, 256, 1024, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 138),
    (80, 10240, 60, 8, 4, 1024, 1792, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 148),
    (128, 16384, 96, 8, 16, 1920, 2160, 155),
    (128, 20480, 105, 8, 35, 2520, 2520, 163),
    (160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def error(heads: int, hidden: int, layers: int, tp: int, pp: int, num: int, batch: int, tflops: int) -> float:
    """Predicted over published iteration time, less one."""
    model = ModelSpec("gpt", "gpt", layers, hidden, 4 * hidden, heads, VOCAB, max_positions=LENGTH, tied=True)
    once = 1 + LENGTH / (6 * hidden) + VOCAB / (16 * layers * hidden)
    published = 96 * batch * LENGTH * layers * hidden**2 * once / (num * tflops * 1e12)
    dp = num // (tp * pp)
    found = []
    for micro_batch in (1, 2, 4, 16):
        for chunks in (1, 2) if pp > 1 else (1,):
            num_micro, left = divmod(batch, micro_batch * dp)
            if left or num_micro < pp or pp * chunks > layers or (chunks > 1 and num_micro % pp):
                continue
            layout = Layout(
                tp=tp, pp=pp, dp=dp, micro_batch=micro_batch, virtual_stages=chunks, zero=0, recompute="full"
            )
            job = {"global_batch": batch, "sequence_length": LENGTH, "precision": "fp16", "recipe": MEGATRON_UNFUSED}
            found.append(estimate_step(model, layout, "A100", **job).step_s)  # type: ignore[arg-type]
    return min(found) / published - 1


def test_the_megatron_table_is_predicted_cold() -> None:
    errors = [abs(error(*row)) for row in TABLE]
    assert statistics.median(errors) < 0.05
    assert max(errors) < 0.10


@pytest.mark.parametrize("row", [TABLE[0], TABLE[-1]])
def test_both_ends_of_it(row: tuple[int, ...]) -> None:
    assert abs(error(*row)) < 0.10  # type: ignore[arg-type]
