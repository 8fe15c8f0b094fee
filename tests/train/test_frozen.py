"""Frozen tensors and adapters (B28): state exists where it must, frozen bits stay, layouts change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from logical import merge, train_from
from ranks import run_ranks
from test_reference import logits
from twins import TIMEOUT_S, gpt, job, llama, max_loss_difference, plan_of, run, text, trainer, twin

from suika.core.errors import SpecError
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.model import Lora, ModelSpec
from suika.core.tensors import logical_tensors
from suika.reshard.state import StateKey
from suika.runtime.program import RankGroups
from suika.train.optimizer import learning_rate
from suika.train.program import build

ADAPTED = llama(kv_heads=1, lora=Lora(3, ("q", "k", "v", "o", "gate", "up", "down")))
# The first stage of two trains nothing, the embedding is tied and frozen at both ends, a bias is frozen by itself.
HALF = gpt(frozen=("embedding.weight", "positions.*", "layers.[01].*", "layers.3.mlp.up.bias"))


def trained(spec: JobSpec) -> dict[str, bool]:
    return {t.name: t.trained for t in logical_tensors(spec.model, spec.sequence_length)}


def textbook_weights(model: ModelSpec, p: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """W + alpha / rank x B A in place of each adapted W."""
    if model.lora is None:
        return p
    share = model.lora.alpha / model.lora.rank
    return {
        name: w + share * p[f"{name.removesuffix('weight')}lora_b"] @ p[f"{name.removesuffix('weight')}lora_a"]
        if f"{name.removesuffix('weight')}lora_a" in p
        else w
        for name, w in p.items()
    }


@pytest.mark.parametrize("model", [ADAPTED, HALF], ids=["lora", "frozen"])
def test_steps_are_those_of_textbook_pytorch(model: ModelSpec) -> None:
    spec = job(model)
    program = build(spec, plan_of(Layout()), 0, RankGroups(None, None, None, None, None), text())
    fresh = program.initialise()
    tensors = logical_tensors(model, spec.sequence_length)
    p = {t.name: fresh[f"weight/{t.name}"].requires_grad_(t.trained) for t in tensors}
    settings, free = spec.optimizer, [t for t in tensors if t.trained]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p[t.name] for t in free if t.decay], "weight_decay": settings.weight_decay},
            {"params": [p[t.name] for t in free if not t.decay], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.eps,
    )
    results = twin(spec, 6)
    for step, result in enumerate(results):
        samples = torch.from_numpy(program.dataset.samples(step * spec.global_batch, (step + 1) * spec.global_batch))
        out, _ = logits(model, textbook_weights(model, p), samples[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1), samples[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        grad_norm = torch.nn.utils.clip_grad_norm_([p[t.name] for t in free], settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step, spec.steps)
        optimizer.step()
        assert result.loss == pytest.approx(loss.item(), abs=1e-9)
        assert result.grad_norm == pytest.approx(grad_norm.item(), abs=1e-6)
    assert results[-1].loss < results[0].loss


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (ADAPTED, Layout(tp=4, micro_batch=8)),
        (ADAPTED, Layout(tp=2, pp=2, dp=2, micro_batch=2, sequence_parallel=True, recompute="full")),
        (HALF, Layout(pp=2, micro_batch=2)),
        (HALF, Layout(tp=2, dp=3, sequence_parallel=True, zero_buckets="stage")),
    ],
    ids=["lora-tp4", "lora-tp2pp2dp2-sp", "frozen-pp2", "frozen-tp2dp3-sp"],
)
def test_losses_are_those_of_one_process(model: ModelSpec, layout: Layout) -> None:
    spec = job(model)
    assert max_loss_difference(run(spec, layout, 6), twin(spec, 6)) < 1e-9


@pytest.mark.parametrize(("model", "precision"), [(ADAPTED, "bf16"), (HALF, "fp64")], ids=["lora-bf16", "frozen-fp64"])
def test_state_exists_where_it_did_and_frozen_bits_stay(model: ModelSpec, precision: str) -> None:
    """B28: TP 1 > 2, DP 2 > 3, PP 1 > 2 and back; kinds of state by tensor, frozen weights bit by bit."""
    spec = job(model, precision, steps=8)
    first, _, _ = train_from(spec, Layout(), 0)
    state, records, results = None, None, []
    for layout in (Layout(tp=2, dp=2, micro_batch=2), Layout(pp=2, dp=3), Layout(tp=2, pp=2, micro_batch=2), Layout()):
        state, records, some = train_from(spec, layout, 2, state, records)
        results += some
    assert state is not None
    optimizer = {"m", "v"} | ({"master"} if precision == "bf16" else set())
    for name, is_trained in trained(spec).items():
        kinds = {key.kind for key in state if key.tensor == name}
        assert kinds == {"weight"} | (optimizer if is_trained else set())
        key = StateKey(name, "weight")
        if not is_trained:
            assert np.array_equal(state[key], first[key]), name
        if is_trained and name.endswith(("weight", "lora_a", "lora_b")):
            assert not np.array_equal(state[key], first[key]), name
    if precision == "fp64":
        assert max_loss_difference(results, twin(spec, 8)) < 1e-9


def test_requires_grad_and_buffers_of_a_rank_that_trains_nothing() -> None:
    spec = job(HALF)
    text()

    def body(rank: int, store: dist.Store) -> tuple[set[str], set[str], dict[str, bool]]:
        program = trainer(spec, Layout(pp=2, micro_batch=2), rank, store)
        buffers = program.initialise()
        program.bind(buffers)
        program.step(())
        flags = {name: p.requires_grad for chunk in program.stage.chunks for name, p in chunk.named_parameters()}
        return {b.name for b in program.buckets}, {name.split("/")[0] for name in buffers}, flags

    first, last = run_ranks(2, body, TIMEOUT_S)
    assert first[:2] == ({"embedding.frozen", "layers.0.frozen", "layers.1.frozen"}, {"weight"})
    assert last[0] == {"layers.2", "layers.3", "layers.3.frozen", "head", "head.frozen"}
    assert first[2] | last[2] == trained(spec)


def test_merging_says_when_a_frozen_copy_differs() -> None:
    """A test of the test: the oracle looks at frozen weights too."""
    spec, layout = job(HALF), Layout(dp=2)
    ranks: list[dict[str, Any]] = []
    for rank in (0, 1):
        program = build(spec, plan_of(layout), rank, RankGroups(None, None, None, None, None), text())
        ranks.append({name: buffer.numpy() for name, buffer in program.initialise().items()})
    ranks[1]["weight/layers.0.mlp.up.weight"][2, 3] += 1
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up\.weight.*rank 1 and ranks \[0\]"):
        merge(spec, layout, ranks)


BASE = {"name": "x", "data": "d", "global_batch": 8, "sequence_length": 16, "steps": 1}
SHAPE = {"family": "llama", "layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}


def parsed(**changes: Any) -> ModelSpec:
    return parse_job({**BASE, "model": {**SHAPE, **changes}}).model


def test_a_job_file_says_what_is_trained() -> None:
    model = parsed(lora={"rank": 4, "targets": ["q", "down"], "alpha": 8})
    assert model.lora == Lora(4, ("q", "down"), 8.0)
    assert {t.name.rpartition(".")[0] for t in logical_tensors(model) if t.trained} == {
        f"layers.{i}.{part}" for i in (0, 1) for part in ("attention.q", "mlp.down")
    }
    assert {t.name for t in logical_tensors(parsed(frozen=["layers.*", "final_norm.*"])) if t.trained} == {
        "embedding.weight",
        "head.weight",
    }
    kept = parsed(lora={"rank": 2}, frozen=["layers.*"])  # with patterns of its own, the rest is trained as well
    assert {t.name for t in logical_tensors(kept) if t.trained and "lora" not in t.name} == {
        "embedding.weight",
        "final_norm.weight",
        "head.weight",
    }
    spec = parse_job({**BASE, "model": {**SHAPE, "lora": {"rank": 2}}})
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frozen": ["layers.7.*"]}, r"model\.frozen.*layers\.7.*matches no tensor"),
        ({"frozen": ["*"]}, r"model\.frozen.*leaves nothing to train"),
        ({"frozen": "layers.*"}, r"model\.frozen"),
        ({"lora": {"rank": 0}}, r"model\.lora\.rank"),
        ({"lora": {"targets": ["q"]}}, r"model\.lora\.rank"),
        ({"lora": {"rank": 2, "targets": ["wings"]}}, r"model\.lora\.targets"),
        ({"lora": {"rank": 2, "targets": []}}, r"model\.lora\.targets"),
        ({"lora": {"rank": 2, "wings": 1}}, r"model\.lora\.wings"),
        ({"lora": {"rank": 2, "targets": ["gate"]}, "family": "gpt"}, r"leaves nothing to train"),
        ({"lora": 3}, r"model\.lora"),
        ({"lora": {"rank": 2, "targets": ["q", "gate"]}, "family": "gpt"}, r"model\.lora\.targets.*is in no layer"),
        (
            {"lora": {"rank": 2, "targets": ["q", "up"]}, "experts": 4, "experts_per_token": 2, "expert_ffn": 8},
            r"model\.lora\.targets.*is in routed experts only",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parsed(**changes)
