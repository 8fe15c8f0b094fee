"""Rank order is explicit; a plan is validated once, totally."""

from __future__ import annotations

import numpy as np
import pytest

from suika.core.cluster import Device, parse_cluster_shorthand
from suika.core.errors import SpecError
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.core.model import ModelSpec
from suika.core.plan import Plan

MODEL = ModelSpec("m", "gpt", layers=4, hidden=32, ffn=64, heads=4, vocab=64)
CLUSTER = parse_cluster_shorthand("2x4:cpu")


def test_default_order_is_the_array_view_dp_pp_tp() -> None:
    grid = np.arange(12).reshape(2, 3, 2)  # dp, pp, tp
    mesh = Mesh(Layout(tp=2, pp=3, dp=2))
    for dp, pp, tp in np.ndindex(grid.shape):
        rank = int(grid[dp, pp, tp])
        assert mesh.coordinate(rank)[:2] == (dp, pp)
        assert mesh.coordinate(rank).tp == tp
        assert mesh.rank(dp=dp, pp=pp, tp=tp) == rank
        assert mesh.group(rank, "tp") == tuple(grid[dp, pp, :])
        assert mesh.group(rank, "dp", "tp") == tuple(grid[:, pp, :].ravel())


def test_other_orders_are_explicit() -> None:
    mesh = Mesh(Layout(tp=2, dp=3), order=("tp", "pp", "cp", "dp"))
    assert [mesh.coordinate(r).tp for r in range(6)] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(SpecError, match=r"mesh.order"):
        Mesh(Layout(), order=("tp", "pp"))


def test_plan_checks_everything_once() -> None:
    devices = CLUSTER.devices
    plan = Plan.checked(Layout(tp=2, pp=2), devices[:4], MODEL, 8, 16, CLUSTER)
    assert plan.layout.layers_per_stage == (2, 2)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_dict(plan.to_dict()).digest == plan.digest
    assert Plan.checked(Layout(tp=2, pp=2), devices[4:], MODEL, 8, 16, CLUSTER).digest != plan.digest
    for layout, where, message in [
        (Layout(tp=2), devices[:4], r"tp\(2\) \* pp\(1\) \* dp\(1\) \* cp\(1\) != devices\(4\)"),
        (Layout(tp=2), (devices[0], devices[0]), "names a device twice"),
        (Layout(tp=2), (devices[0], Device("n9", 0)), "not in the cluster"),
    ]:
        with pytest.raises(SpecError, match=message):
            Plan.checked(layout, where, MODEL, 8, 16, CLUSTER)
