"""ZeRO 3: weights in slices, whole only while used. Runs against one process, moves, and what stands in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from logical import same_bits, train_from
from ranks import run_ranks
from twins import TIMEOUT_S, gpt, job, llama, max_loss_difference, run, text, trainer, twin

from suika.core.layout import Layout
from suika.core.model import Lora, ModelSpec
from suika.train.sharded import Span, Use
from suika.train.stage import Chunk

LORA = llama(kv_heads=1, dropout=0.1, lora=Lora(2, ("q", "k", "o", "down")))

MIXTURE = llama(
    layers=2, experts=4, experts_per_token=2, shared_experts=1, lora=Lora(2, ("v", "gate")), frozen=("layers.0.*",)
)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (gpt(), Layout(zero=3)),
        (gpt(), Layout(dp=2, zero=3, micro_batch=2)),
        (gpt(), Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True)),
        (llama(kv_heads=1, layers=3), Layout(tp=2, dp=4, zero=3, zero_buckets="stage", sequence_parallel=True)),
        (llama(layers=3), Layout(pp=2, dp=2, zero=3, recompute="full")),
        (llama(tied=True), Layout(dp=4, zero=3, recompute="selective", zero_buckets="stage")),
        (LORA, Layout(tp=2, dp=2, zero=3)),
        (gpt(frozen=("embedding.*", "layers.[01].*")), Layout(pp=2, dp=2, zero=3)),
        (MIXTURE, Layout(tp=2, dp=4, ep=2, zero=3)),
    ],
    ids=[
        "alone",
        "dp2",
        "gpt-tp2pp2dp2-sp",
        "kv1-tp2dp4-sp-stage",
        "pp2dp2-full",
        "tied-dp4-selective",
        "lora",
        "frozen",
        "mixture-ep2",
    ],
)
def test_losses_are_those_of_one_process(model: ModelSpec, layout: Layout) -> None:
    spec = job(model)
    results = run(spec, layout, 5)
    assert max_loss_difference(results, twin(spec, 5)) < 1e-9
    assert max(abs(a.grad_norm - b.grad_norm) for a, b in zip(results, twin(spec, 5), strict=True)) < 1e-9


@pytest.mark.parametrize("precision", ["fp64", pytest.param("bf16", marks=pytest.mark.fault)])
def test_moves_between_zero_1_and_3(precision: str) -> None:
    """In both directions, with a tied embedding on two stages; copies are compared bit by bit after each move."""
    spec = job(gpt(layers=3, dropout=0.1, vocab=259), precision, steps=8)
    state, records, results = None, None, []
    for layout in (
        Layout(tp=2, dp=2, micro_batch=2),
        Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True, zero_buckets="stage"),
        Layout(dp=3),
        Layout(pp=3, dp=2, zero=3),
    ):
        state, records, some = train_from(spec, layout, 2, state, records)
        results += some
    assert max_loss_difference(results, twin(spec, 8)) < (1e-9 if precision == "fp64" else 5e-3)
    assert state is not None
    for layout in (Layout(dp=2, zero=3), Layout(tp=2)):
        moved, _, _ = train_from(spec, layout, 0, state, records)
        assert same_bits(moved, state)


class Standing:
    """Elements of gathered weights that are in memory, and the most that ever were."""

    def __init__(self, gather: Callable[[Span], torch.Tensor]) -> None:
        self.now = self.most = 0
        self._gather = gather

    def of(self, span: Span) -> torch.Tensor:
        whole = self._gather(span)
        self.now += span.numel
        self.most = max(self.most, self.now)
        weakref.finalize(whole.untyped_storage(), self._gone, span.numel)
        return whole

    def _gone(self, numel: int) -> None:
        self.now -= numel


def _uses(chunk: Chunk) -> list[Use]:
    return [*chunk._uses.values(), *(block.use for block in chunk.layers.values())]


def test_weights_of_two_uses_at_most_stand_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between uses a rank holds its slices; gradients are slices always. Counted while two micro-batches go through."""
    spec = job(llama(layers=4), global_batch=4)
    layout = Layout(dp=2, zero=3)
    text()

    def body(rank: int, store: dist.Store) -> tuple[int, int, int, int]:
        seen = Standing(Span.gather)
        monkeypatch.setattr(Span, "gather", lambda span: seen.of(span))
        program = trainer(spec, layout, rank, store)
        program.bind(program.initialise())
        program.step(())
        uses = [use for chunk in program.stage.chunks for use in _uses(chunk)]
        largest = sorted(sum(span.numel for span in use.spans) for use in uses)[-2:]
        grads = sum(gradient.owned.numel() for gradient in program.gradients.buckets)
        return seen.most, sum(largest), grads, sum(b.numel for b in program.buckets)

    for most, two, grads, numel in run_ranks(2, body, TIMEOUT_S):
        assert 0 < most <= two
        assert grads <= numel // 2 + 8
