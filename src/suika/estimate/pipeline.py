"""Makespan of pipeline schedules: the max-plus recurrence itself, and its closed form for columns of layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from suika.estimate.columns import Array

SETTLED_ROUNDS = 6


def one_f_one_b(num_stages: int, stage: int, num_micro: int) -> list[tuple[str, int]]:
    """Order of a stage's passes: warm-up forwards, then one forward and one backward in turn, then the rest."""
    warm = min(num_stages - 1 - stage, num_micro)
    order = [("F", i) for i in range(warm)]
    for i in range(num_micro - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(num_micro - warm, num_micro)]


def interleaved(num_stages: int, stage: int, num_micro: int, chunks: int) -> list[tuple[str, int, int]]:
    """Order (pass, chunk, micro-batch) of interleaved 1F1B: `num_stages` micro-batches at a time, chunk by chunk."""
    total = num_micro * chunks
    group = num_stages * chunks

    def place(index: int, forward: bool) -> tuple[int, int]:
        within = index % group
        chunk = within // num_stages
        micro = index // group * num_stages + within % num_stages
        return (chunk if forward else chunks - 1 - chunk), micro

    warm = min(total, 2 * (num_stages - 1 - stage) + (chunks - 1) * num_stages)
    order = [("F", *place(i, True)) for i in range(warm)]
    for i in range(total - warm):
        order += [("F", *place(warm + i, True)), ("B", *place(i, False))]
    return order + [("B", *place(i, False)) for i in range(total - warm, total)]


def makespan(
    forward_s: Sequence[float], backward_s: Sequence[float], num_stages: int, num_micro: int, hop_s: float = 0.0
) -> float:
    """End of the last pass of the real schedule. Times are per chunk, in model order; chunk c runs on stage c % stages.

    A pass starts when its stage is free and its input has arrived (`hop_s` after it was made on another stage).
    """
    num_chunks = len(forward_s)
    v = num_chunks // num_stages
    if v == 1:
        orders = [[(p, s, i) for p, i in one_f_one_b(num_stages, s, num_micro)] for s in range(num_stages)]
    else:
        orders = [
            [(p, c * num_stages + s, i) for p, c, i in interleaved(num_stages, s, num_micro, v)]
            for s in range(num_stages)
        ]
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * num_stages, [0] * num_stages
    waiting = set(range(num_stages))
    hop = hop_s if num_stages > 1 else 0.0
    while waiting:
        moved = False
        for s in sorted(waiting):
            while at[s] < len(orders[s]):
                kind, chunk, i = orders[s][at[s]]
                if kind == "F":
                    ready = 0.0 if chunk == 0 else done.get(("F", chunk - 1, i), -1.0) + hop
                    needs_ok = chunk == 0 or ("F", chunk - 1, i) in done
                    cost = forward_s[chunk]
                else:
                    last = chunk == num_chunks - 1
                    before = ("F", chunk, i) if last else ("B", chunk + 1, i)
                    needs_ok = before in done
                    ready = done.get(before, 0.0) + (0.0 if last else hop)
                    cost = backward_s[chunk]
                if not needs_ok:
                    break
                free[s] = max(free[s], ready) + cost
                done[kind, chunk, i] = free[s]
                at[s] += 1
                moved = True
            if at[s] == len(orders[s]):
                waiting.discard(s)
        assert moved, "a pipeline schedule waits for itself"
    return max(free)


def long_makespan(forward_s: Sequence[float], backward_s: Sequence[float], num_stages: int, num_micro: int) -> float:
    """`makespan`, in bounded time: after a few rounds of `num_stages` micro-batches each further round takes the same
    (a max-plus recurrence is periodic in the end), so the rest is extrapolated from the last round."""
    rounds, left = divmod(num_micro, num_stages)
    if rounds <= SETTLED_ROUNDS:
        return makespan(forward_s, backward_s, num_stages, num_micro)
    at, before = (
        makespan(forward_s, backward_s, num_stages, n * num_stages + left) for n in (SETTLED_ROUNDS, SETTLED_ROUNDS - 1)
    )
    return at + (rounds - SETTLED_ROUNDS) * (at - before)


def closed_form(first: Array, middle: Array, last: Array, total: Array, num_micro: Array, chunks: Array) -> Array:
    """Makespan when a stage takes `first`, `middle` (the slowest) or `last` per micro-batch, `total` over all stages.

    The slowest stage works without a gap; before and after it the other stages fill and drain, 1/chunks of the way
    each. Equal to `makespan` for pipelines whose slowest stage is an end or whose stages are alike.
    """
    slowest = np.maximum(np.maximum(first, middle), last)
    return num_micro * slowest + (total - slowest) / chunks
