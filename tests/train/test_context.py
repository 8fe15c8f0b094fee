"""Context parallelism: a sequence cut over ranks trains as it does on one."""

from __future__ import annotations

import pytest
import torch
from logical import train_from
from ranks import run_ranks
from twins import gpt, job, llama, max_loss_difference, moe, run, twin

from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.model import ModelSpec
from suika.runtime.groups import build_groups
from suika.train import context
from suika.train.axis import Axis, TensorParallel
from suika.train.parallel import Parallel

CASES = [
    (gpt(layers=2), Layout(cp=4, zero=0, micro_batch=4)),
    (llama(layers=2, dropout=0.1), Layout(cp=2, tp=2, micro_batch=2, sequence_parallel=True, recompute="selective")),
    (llama(layers=4), Layout(cp=2, pp=2, dp=2, virtual_stages=2, zero_buckets="stage")),
    (moe(experts=4), Layout(cp=2, dp=2, tp=2, ep=4, micro_batch=2, sequence_parallel=True)),
]


@pytest.mark.parametrize(("model", "layout"), CASES, ids=lambda case: getattr(case, "name", str(case)))
def test_fp64_is_the_one_process_run(model: ModelSpec, layout: Layout) -> None:
    assert max_loss_difference(run(job(model), layout, 4), twin(job(model), 4)) < 1e-9


def test_moves_to_and_from_cut_sequences() -> None:
    """Replicas of a shard are the dp and cp ranks together: ZeRO slices are cut over both."""
    spec = job(gpt(layers=2))
    state, records, results = None, None, []
    for layout in (Layout(cp=2, dp=2), Layout(tp=2, dp=2, micro_batch=2), Layout(cp=4), Layout(cp=2, pp=2)):
        state, records, more = train_from(spec, layout, 2, state, records)
        results += more
    assert max_loss_difference(results, twin(spec, 8)) < 1e-9


def test_attention_and_its_gradients_are_those_of_the_whole_sequence() -> None:
    B, H, K, L, d, n = 2, 4, 2, 24, 6, 3
    torch.manual_seed(1)
    whole = [torch.randn(B, heads, L, d, dtype=torch.float64) for heads in (H, K, K)]
    seen = torch.randn(B, H, L, d, dtype=torch.float64)  # the gradient that comes back

    def body(rank, store):  # type: ignore[no-untyped-def]
        cp = Axis.of("cp", build_groups(store, "g", Mesh(Layout(cp=n)), rank, 30).cp)
        held = torch.cat([torch.arange(part.start, part.stop) for part in context.context(cp, L)])
        mine = [t[:, :, held].clone().requires_grad_() for t in whole]
        out = context.attend(*mine, cp)
        out.backward(seen[:, :, held])
        return held.tolist(), out.detach(), [t.grad for t in mine]

    ranks = run_ranks(n, body)
    assert sorted(position for held, _, _ in ranks for position in held) == list(range(L))
    inputs = [t.requires_grad_() for t in whole]
    expected = context.attend(*inputs, Axis("cp"))
    expected.backward(seen)
    for held, out, grads in ranks:
        torch.testing.assert_close(out, expected[:, :, held], rtol=0, atol=1e-12)
        for grad, t in zip(grads, inputs, strict=True):
            torch.testing.assert_close(grad, t.grad[:, :, held], rtol=0, atol=1e-12)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("cp", "tp"), [(1, 2), (2, 1), (2, 4), (4, 2), (3, 2)])
def test_every_position_is_held_once(cp: int, tp: int, sequence: bool) -> None:
    """Inside regions once per cp rank, outside of them once per tp rank as well; and each cp rank has equal work."""
    length = 48
    inside, outside, work = [], [], []
    for c in range(cp):
        for t in range(tp):
            tp_axis = TensorParallel(Axis("tp", None, tp, t), sequence)
            parallel = Parallel(tp_axis, Axis("cp", None, cp, c), Axis("ep"))
            held = [p for part in parallel.context(length) for p in range(part.start, part.stop)]
            inside += held if t == 0 else []
            outside += [p for part in parallel.positions(length) for p in range(part.start, part.stop)]
            work.append(sum(p + 1 for p in held))
    assert sorted(inside) == list(range(length))
    assert sorted(outside) == sorted(list(range(length)) * (1 if sequence else tp))
    assert len(set(work)) == 1
