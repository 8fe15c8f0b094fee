"""The demo's comparison: the same move by checkpoint and restart, in both media, and once with cold processes."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from suika.backends.local import LocalBackend
from suika.core.cluster import parse_cluster_shorthand
from suika.core.job import JobSpec, parse_job
from suika.core.layout import Layout
from suika.core.plan import Plan
from suika.demo.result import MoveResult
from suika.demo.rival import add_rivals, cold_restart
from suika.demo.script import llama
from suika.demo.show import Show
from suika.train.data import prepare

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]
CLUSTER = parse_cluster_shorthand("1x2:cpu")


def _plan(spec: JobSpec, layout: Layout, *indices: int) -> Plan:
    devices = tuple(CLUSTER.devices[i] for i in indices)
    return Plan.checked(layout, devices, spec.model, spec.global_batch, spec.sequence_length, CLUSTER)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    data = tmp_path / "text.bin"
    prepare(sysconfig.get_paths()["stdlib"], data, pattern="*.py", max_bytes=100_000)
    return parse_job(llama(data))


def test_a_move_is_done_again_by_checkpoint_and_restart(spec: JobSpec, tmp_path: Path) -> None:
    old, new = _plan(spec, Layout(), 0), _plan(spec, Layout(tp=2), 0, 1)
    move = MoveResult("llama", old, new, "grow", "", 3, 10, 10, 0.1, 1.0, 0.0)
    shared_before = set(os.listdir("/dev/shm"))
    with LocalBackend(CLUSTER, tmp_path / "run", preload=("suika.train.program",)) as backend, Show() as show:
        place = ({"llama": spec}, [move], backend, tmp_path, show)
        (in_memory,) = add_rivals(*place, medium="memory")
        assert in_memory.checkpoint_restart_by == "memory"
        assert in_memory.checkpoint_restart_s is not None
        assert in_memory.checkpoint_restart_s > 0
        (late,) = add_rivals(*place, medium="disk", until_s=0.0)
        assert late == move  # past its time: not begun, and not called tried
        both = add_rivals({"llama": spec}, [in_memory], backend, tmp_path, show, medium="disk")[0]
        assert both.checkpoint_restart_tried == ("memory", "disk")
        assert both.checkpoint_restart_s is not None
        assert both.checkpoint_restart_s <= in_memory.checkpoint_restart_s
        # Processes that import everything first cannot be quicker than forks of one that has.
        assert cold_restart(*place) > both.checkpoint_restart_s
    left = {name for name in set(os.listdir("/dev/shm")) - shared_before if name.startswith("suika-restart")}
    assert not left
    assert not list(tmp_path.glob("suika-restart*"))
