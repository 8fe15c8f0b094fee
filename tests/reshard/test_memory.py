"""B49: predicted peaks against what processes measure of themselves; what cannot fit is refused before it starts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import labels
import pytest
import torch
from processes import run_forked

from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.model import ModelSpec
from suika.reshard.execute import execute
from suika.reshard.lean import LeanMove
from suika.reshard.links import Links
from suika.reshard.memory import peaks, require_fit
from suika.reshard.moveplan import plan_move
from suika.reshard.pieces import lean_peaks, pieces_of
from suika.reshard.state import JobShape, buffer_specs
from suika.reshard.transports import memfd
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.mixed import Mixed

CLUSTER = labels.cluster(nodes=2, devices=2)
MODEL = ModelSpec("wide", "llama", 4, 256, 768, 8, 2048)  # 22 MB of weights, 66 MB of state
SHAPE = JobShape(MODEL, 16, "fp32")
SLACK = 8 << 20  # Python, gloo and the allocator


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


@pytest.mark.parametrize(
    ("old", "new"),
    [(Layout(tp=2), Layout(tp=4)), (Layout(dp=4), Layout(dp=2)), (Layout(pp=1), Layout(pp=2))],
    ids=["tp 2 > 4", "dp 4 > 2", "pp 1 > 2"],
)
def test_b49_measured_peaks_stay_below_the_predicted_ones(tmp_path: Path, old: Layout, new: Layout) -> None:
    before, after = (labels.plan(SHAPE, layout, CLUSTER.devices[: layout.num_ranks]) for layout in (old, new))
    move = plan_move(SHAPE, before, after, CLUSTER, chunk_bytes=1 << 20)

    tiny = JobShape(replace(MODEL, hidden=16, ffn=48, vocab=64, head_dim=2), 16, "fp32")
    small = [labels.plan(tiny, plan.layout, plan.devices) for plan in (before, after)]
    rehearsal, state = plan_move(tiny, *small, CLUSTER), labels.state_of(tiny, small[0])

    def body(rank: int, transport: Gloo) -> tuple[int, int]:
        device, buffers = move.participants[rank], {}
        execute(rehearsal, device, state.get(device, {}), transport)  # code and libraries are paged in now
        if device in before.devices:
            index = before.devices.index(device)
            specs = buffer_specs(MODEL, before.layout, 16, "fp32", index)
            buffers = {name: torch.full(size, float(len(name))) for name, (size, _) in specs.items()}
        ctypes.CDLL(None).malloc_trim(0)  # what the parent had freed is no room that costs nothing
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again here
        held = sum(t.numel() * 4 for t in buffers.values())
        start = peak_bytes()
        execute(move, device, buffers, transport)
        return peak_bytes() - start, held

    results = run_forked(len(move.participants), tmp_path, body)
    for (measured, held), peak in zip(results, peaks(move), strict=True):
        assert held == peak.source
        assert measured <= peak.keep - peak.source + SLACK
        assert measured >= peak.target - peak.kept - SLACK


def test_b49_a_lean_move_holds_the_larger_state_and_one_piece(tmp_path: Path) -> None:
    before, after = (labels.plan(SHAPE, layout, CLUSTER.devices) for layout in (Layout(tp=2, pp=2), Layout(tp=4)))
    move = plan_move(SHAPE, before, after, CLUSTER, chunk_bytes=1 << 20)
    pieces = pieces_of(move, Links(CLUSTER, move.participants))
    predicted = lean_peaks(pieces)

    def body(rank: int, transport: Gloo) -> tuple[int, int]:
        specs = buffer_specs(MODEL, before.layout, 16, "fp32", rank)
        shapes = {name: size for name, (size, _) in specs.items()}
        buffers = {name: memfd.empty(size, torch.float32).fill_(float(len(name))) for name, size in shapes.items()}
        node = Links(CLUSTER, move.participants).node
        held = [memfd.held_bytes()]

        def make(size: Any, dtype: torch.dtype) -> torch.Tensor:
            made = memfd.empty(size, dtype)
            held.append(memfd.held_bytes())
            return made

        lean = LeanMove(pieces, move.participants[rank], buffers, Mixed.of(transport, node), make)
        lean.run()
        transport.all_gather(b"")
        return max(held), memfd.held_bytes()

    results = run_forked(4, tmp_path, body)
    for (most, after_it), expected, peak in zip(results, predicted, peaks(move), strict=True):
        assert after_it == peak.target, "nothing of the old state is left"
        assert max(peak.source, peak.target) <= most <= expected < 0.75 * peak.keep


def test_b49_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    before, after = (labels.plan(SHAPE, Layout(tp=tp), CLUSTER.devices[:tp]) for tp in (2, 4))
    move = plan_move(SHAPE, before, after, CLUSTER)
    worst = max(peak.keep for peak in peaks(move))
    require_fit(move, dict.fromkeys(CLUSTER.devices, worst))
    require_fit(move, dict.fromkeys(CLUSTER.devices, worst + 10), step_bytes=10)
    with pytest.raises(SpecError, match=r"n0/1.*needs .* bytes .* letting go of old state early would need"):
        require_fit(move, dict.fromkeys(CLUSTER.devices, worst - 1))
    assert all(peak.lean <= peak.keep for peak in peaks(move) if peak.source)


def test_what_stays_costs_nothing() -> None:
    plan = labels.plan(SHAPE, Layout(tp=2), CLUSTER.devices[:2])
    assert all(p.keep - p.source == p.scratch for p in peaks(plan_move(SHAPE, plan, plan, CLUSTER)))
