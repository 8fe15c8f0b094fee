"""B52: micro-batch counts around the number of stages, and shares that differ between data-parallel ranks."""

from __future__ import annotations

import pytest
from twins import gpt, job, max_loss_difference, plan_of, run, text, twin

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.runtime.program import RankGroups
from suika.train.program import build


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 5])
def test_four_stages_with_few_micro_batches(num_micro_batches: int) -> None:
    spec = job(gpt(), global_batch=num_micro_batches)
    layout = Layout(pp=4)
    if num_micro_batches < 4:
        groups = RankGroups(None, None, None, None, None)
        with pytest.raises(SpecError, match=rf"smallest dp rank has {num_micro_batches} micro-batches for pp\(4\)"):
            build(spec, plan_of(layout), 0, groups, text())
    else:
        assert max_loss_difference(run(spec, layout, 3), twin(spec, 3)) < 1e-9


def test_a_batch_of_eight_on_three_pipelines() -> None:
    spec = job(gpt(layers=2))
    assert max_loss_difference(run(spec, Layout(pp=2, dp=3), 3), twin(spec, 3)) < 1e-9


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(cp=2), "layout.cp"),
        (Layout(zero=3), "layout.zero"),
        (Layout(pp=2, virtual_stages=2), "layout.virtual_stages"),
        (Layout(tp=3), "layout.tp"),
    ],
)
def test_what_cannot_run_is_refused_with_its_field(layout: Layout, field: str) -> None:
    with pytest.raises(SpecError) as refused:
        build(job(gpt()), plan_of(layout), 0, RankGroups(None, None, None, None, None), text())
    assert refused.value.field == field
