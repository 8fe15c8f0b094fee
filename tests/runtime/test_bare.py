"""The benchmark's own processes: they find every element, and what a neighbour gives away costs nothing."""

from __future__ import annotations

from pathlib import Path

from suika.backends.local import LocalBackend
from suika.bench.bare import LAPS, measure

from .conftest import CLUSTER, plan, spec


def test_a_bare_move_is_checked_element_by_element(backend: LocalBackend, tmp_path: Path) -> None:
    job = spec()
    old, new = plan("tp=2,pp=1,dp=2", "a0 a1 b0 b1", job), plan("tp=1,pp=3,dp=1", "a0 b0 b2", job)
    found = measure(job, old, new, backend, CLUSTER, tmp_path, "bare-one")
    assert found.exact
    assert found.moved_bytes - found.adopted_bytes > found.worst_bytes > 0
    assert found.kept_copied_bytes == 0
    assert 0 < found.bare_s < 10
    assert LAPS >= 5


def test_a_stage_that_a_neighbour_takes_over_is_not_copied(backend: LocalBackend, tmp_path: Path) -> None:
    job = spec()
    old, new = plan("tp=1,pp=2,dp=1,layers_per_stage=2:1", "a0 a1", job), plan("tp=1,pp=1,dp=1", "a2", job)
    found = measure(job, old, new, backend, CLUSTER, tmp_path, "bare-two")
    assert found.exact
    assert (found.worst_bytes, found.recut_bytes) == (0, 0)
    assert found.adopted_bytes == found.moved_bytes > 0
