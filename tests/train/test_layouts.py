"""Every 3D layout trains as one process does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from twins import gpt, job, llama, max_loss_difference, run, twin

from suika.core.layout import Layout, micro_batch_shares
from suika.core.model import ModelSpec
from suika.train.gradients import Gradients

FP64_BOUND, FP32_BOUND = 1e-9, 1e-5

LAYOUTS = [
    Layout(tp=2, micro_batch=4),
    Layout(tp=2, micro_batch=4, sequence_parallel=True),
    Layout(pp=2, micro_batch=2),
    Layout(pp=3, micro_batch=2),  # 1, 2, 1 layers
    Layout(pp=2, layers_per_stage=(3, 1)),
    Layout(pp=2, virtual_stages=2, dp=2, zero_buckets="stage"),
    Layout(dp=2, micro_batch=2),
    Layout(dp=3),  # shares of 3, 3 and 2 sequences
    Layout(dp=2, zero=0, micro_batch=2),
    Layout(dp=2, pp=2, zero_buckets="stage"),
    Layout(dp=3, pp=2),
    Layout(tp=2, dp=2, micro_batch=4),
    Layout(tp=2, pp=2, layers_per_stage=(1, 3), micro_batch=4, sequence_parallel=True),
    Layout(tp=2, pp=2, dp=2, micro_batch=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [gpt(), llama()], ids=lambda m: m.family)
def test_fp64_is_the_one_process_run(model: ModelSpec, layout: Layout) -> None:
    assert max_loss_difference(run(job(model), layout), twin(job(model))) < FP64_BOUND


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (gpt(), Layout(tp=2, pp=2, dp=2, micro_batch=2)),
        (gpt(), Layout(dp=3)),
        (llama(), Layout(tp=2, pp=2, micro_batch=4, sequence_parallel=True)),
        (llama(), Layout(pp=3, dp=2)),
    ],
    ids=["gpt-tp2pp2dp2", "gpt-dp3", "llama-tp2pp2-sp", "llama-pp3dp2"],
)
def test_fp32_is_the_one_process_run(model: ModelSpec, layout: Layout) -> None:
    spec = job(model, "fp32")
    assert max_loss_difference(run(spec, layout), twin(spec)) < FP32_BOUND


@pytest.mark.parametrize("layout", [Layout(dp=3), Layout(tp=2, pp=2, micro_batch=4, sequence_parallel=True)], ids=str)
@pytest.mark.parametrize("model", [gpt(layers=2), llama(layers=2)], ids=lambda m: m.family)
def test_bf16_with_fp32_masters_stays_within_its_rounding(model: ModelSpec, layout: Layout) -> None:
    results = run(job(model, "bf16"), layout)
    assert max_loss_difference(results, twin(job(model, "bf16"))) < 5e-3
    assert max_loss_difference(results, twin(job(model, "fp32"))) < 1e-2


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [gpt, llama])
def test_tied_and_untied_embeddings(make: Callable[..., ModelSpec], tied: bool) -> None:
    spec = job(make(tied=tied, layers=2))
    assert max_loss_difference(run(spec, Layout(tp=2, pp=2, micro_batch=4), 5), twin(spec, 5)) < FP64_BOUND


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("make", [gpt, llama])
def test_recomputing_activations_changes_no_bit(make: Callable[..., ModelSpec], recompute: str) -> None:
    spec = job(make(layers=2))
    layout = Layout(tp=2, pp=2, micro_batch=4, sequence_parallel=True)
    again = Layout(tp=2, pp=2, micro_batch=4, sequence_parallel=True, recompute=recompute)  # type: ignore[arg-type]
    assert run(spec, again, 3) == run(spec, layout, 3)


@pytest.mark.parametrize(
    ("vocab", "tp"),
    [(257, 2), (259, 4), (9, 4)],  # 129 + 128; 65 x 3 + 64; 3 x 3 + 0
)
def test_vocabularies_that_tp_does_not_divide(vocab: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if vocab < 257:  # the text has more tokens than such a model: fold them
        from suika.train.dataset import Dataset

        samples = Dataset.samples
        monkeypatch.setattr(Dataset, "__init__", _any_vocab(Dataset.__init__))
        monkeypatch.setattr(Dataset, "samples", lambda self, start, stop: samples(self, start, stop) % vocab)
    spec = job(llama(vocab=vocab, layers=1, kv_heads=4))
    assert max_loss_difference(run(spec, Layout(tp=tp, micro_batch=8), 3), twin(spec, 3)) < FP64_BOUND


def _any_vocab(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, data, length, vocab, seed: init(self, data, length, 257, seed)


def test_a_global_batch_that_dp_does_not_divide_keeps_its_size() -> None:
    """B22: 256 sequences on 7 ranks are 256, not 252; and the real run weighs 16 sequences on 3 ranks rightly."""
    assert sum(micro_batch_shares(256, 1, 7)) == 256
    spec = job(llama(layers=2), global_batch=16)
    results = run(spec, Layout(dp=3, micro_batch=2), 5)
    assert {step.num_tokens for step in results} == {16 * spec.sequence_length}
    assert max_loss_difference(results, twin(spec, 5)) < FP64_BOUND


@pytest.mark.parametrize("broken", ["_sum_over_dp", "_sum_over_tp"])
def test_the_bounds_notice_a_missing_reduction(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test of the tests: without one of the reductions the runs must differ by far more than the bounds."""
    spec = job(gpt(layers=2))
    layout = Layout(tp=2, dp=2, micro_batch=4, sequence_parallel=True)
    reference = twin(spec, 10)
    monkeypatch.setattr(Gradients, broken, lambda self: None)
    monkeypatch.setattr("twins.run_ranks", _first_rank_only)
    assert max_loss_difference(run(spec, layout), reference) > 30 * FP32_BOUND


def _first_rank_only(num_ranks: int, body: Callable, timeout_s: float) -> list:
    """Ranks of a broken run do not agree with each other; look at one."""
    from ranks import run_ranks

    return run_ranks(num_ranks, body, timeout_s)[:1]


def test_the_same_layout_gives_the_same_bits() -> None:
    spec, layout = job(llama(), "fp32"), Layout(pp=2, dp=2, micro_batch=2)
    assert run(spec, layout, 5) == run(spec, layout, 5)
