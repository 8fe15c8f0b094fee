"""Chains of random layouts in all dimensions at once, against the process that never moves."""

from __future__ import annotations

import random

import pytest
from logical import train_from
from twins import gpt, job, llama, max_loss_difference, moe, twin

from suika.core.errors import SpecError
from suika.core.job import JobSpec
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.train.limits import check_runnable

MODELS = [
    moe(layers=4, experts=4, dropout=0.1),
    moe(gpt, layers=4, tied=True, experts=4, shared_experts=0),
    llama(tied=True, kv_heads=1, dropout=0.1),
]


def draw(rng: random.Random, spec: JobSpec, most_ranks: int) -> Layout:
    """Any layout that the trainer runs, of 2 to `most_ranks` ranks."""
    while True:
        pp = rng.choice((1, 1, 2, 3))
        virtual = rng.choice((1, 2)) if pp > 1 else 1
        try:
            layout = Layout(
                tp=rng.choice((1, 1, 2)),
                pp=pp,
                dp=rng.choice((1, 2, 3, 4)),
                cp=rng.choice((1, 1, 2)),
                ep=rng.choice((1, 2, 4)),
                micro_batch=rng.choice((1, 2, 4)),
                layers_per_stage=split(rng, spec.model.layers, pp * virtual),
                virtual_stages=virtual,
                zero=rng.choice((0, 1, 3)),
                recompute=rng.choice(("none", "selective", "full")),
                sequence_parallel=rng.random() < 0.5,
                zero_buckets=rng.choice(("layer", "stage")),
            )
            check_runnable(spec, layout)
        except SpecError:
            continue
        if 1 < layout.num_ranks <= most_ranks:
            return layout


def split(rng: random.Random, layers: int, chunks: int) -> tuple[int, ...]:
    """`layers` in `chunks` uneven parts; nothing where they are too few."""
    if chunks > layers:
        return ()
    cuts = sorted(rng.sample(range(1, layers), chunks - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS, ids=("moe-llama", "moe-gpt-tied", "llama-mqa-tied"))
def test_a_chain_of_random_layouts_is_the_one_process_run(model: ModelSpec, seed: int) -> None:
    rng, spec = random.Random(seed), job(model, global_batch=12)
    chain = [draw(rng, spec, 8) for _ in range(6)]
    state, records, results = None, None, []
    for layout in chain:
        state, records, more = train_from(spec, layout, 2, state, records)
        results += more
    assert max_loss_difference(results, twin(spec, 12)) < 1e-9, [str(layout) for layout in chain]
