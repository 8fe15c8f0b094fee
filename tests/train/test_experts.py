"""Mixtures of experts: whatever ranks the experts lie on, and wherever the job moves, one process would do the same."""

from __future__ import annotations

import pytest
import torch
from logical import train_from
from twins import gpt, job, llama, max_loss_difference, moe, plan_of, run, text, twin

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.runtime.program import RankGroups
from suika.train.experts import choose
from suika.train.program import build

LAYOUTS = [
    Layout(dp=3, ep=3),
    Layout(tp=2, dp=2, ep=2, micro_batch=2, sequence_parallel=True, recompute="full"),
    Layout(dp=4, ep=2, pp=2, zero_buckets="stage"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fp64_is_the_one_process_run(layout: Layout) -> None:
    spec = job(moe(), global_batch=12)
    assert max_loss_difference(run(spec, layout, 5), twin(spec, 5)) < 1e-9


def test_biases_of_experts_over_tp() -> None:
    """gpt has them: gated, added inside of the region by one tp rank, their gradients the same on all."""
    spec = job(moe(gpt))
    assert max_loss_difference(run(spec, Layout(tp=2, dp=2, ep=2, zero=0, micro_batch=2), 5), twin(spec, 5)) < 1e-9


def test_bf16_stays_within_its_rounding() -> None:
    """Routing is done in fp32 whatever the weights are."""
    spec = job(moe(experts=4, layers=2), "bf16")
    results = run(spec, Layout(cp=2, dp=2, ep=4, micro_batch=2), 5)
    assert max_loss_difference(results, twin(spec, 5)) < 5e-3


def test_moves_of_experts() -> None:
    """Experts change ranks, lose and gain replicas; copies are compared bit by bit at each stop."""
    spec = job(moe())
    chain = [
        Layout(dp=4, ep=2),
        Layout(tp=2, dp=2, ep=2, micro_batch=2),
        Layout(pp=3, micro_batch=2),
        Layout(dp=2, zero_buckets="stage"),
    ]
    state, records, results = None, None, []
    for layout in chain:
        state, records, more = train_from(spec, layout, 2, state, records)
        results += more
    assert max_loss_difference(results, twin(spec, 8)) < 1e-9


def test_equal_scores_go_to_the_lower_number() -> None:
    """Also when another layout's sums gave them other last bits."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.5, 0.5, 0.5, 0.5, 0.5]], dtype=torch.float64)
    rounded = scores + 1e-15 * torch.tensor([1.0, -2.0, 3.0, 0.0, 5.0])
    assert choose(scores, 2).tolist() == choose(rounded, 2).tolist() == [[1, 2], [0, 1]]


def test_a_job_whose_experts_all_tie_trains_alike_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers that start with equal rows: every token ties over all experts."""
    from suika.train import program

    fresh = program.initial_shard

    def equal_rows(model, seed, tensor, starts, stops):  # type: ignore[no-untyped-def]
        shard = fresh(model, seed, tensor, starts, stops)
        return shard[:1].repeat(len(shard), 0) if "router" in tensor.name else shard

    monkeypatch.setattr(program, "initial_shard", equal_rows)
    spec = job(moe(), seed=5)
    one = run(spec, Layout(), 3)
    assert max_loss_difference(run(spec, Layout(tp=2, dp=2, ep=2, micro_batch=2), 3), one) < 1e-9


@pytest.mark.parametrize(
    ("model", "layout", "field"),
    [
        (llama(), Layout(dp=2, ep=2), "layout.ep"),
        (moe(), Layout(dp=4, ep=4), "layout.ep"),  # 6 experts on 4 ranks
        (moe(), Layout(dp=3, ep=2), "layout.ep"),
        (moe(), Layout(dp=6, ep=6), "layout.ep"),  # 8 sequences on 6 ranks: some would wait for tokens of others
    ],
)
def test_what_cannot_run_is_refused_with_its_field(model: ModelSpec, layout: Layout, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        build(job(model), plan_of(layout), 0, RankGroups(None, None, None, None, None), text())
    assert refused.value.field == field
