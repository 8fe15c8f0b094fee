"""Scaling curves: ordered, feasible, cached by contents, sensible on every cluster that people describe."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from suika.control.commands import command_curve
from suika.core.cluster import Cluster, Node, parse_cluster_shorthand
from suika.core.errors import SpecError
from suika.core.layout import Layout, check_layout
from suika.core.model import ModelSpec
from suika.estimate.predict import estimate_step
from suika.plan.curves import scaling_curve, shapes_of

TINY = ModelSpec("tiny", "llama", 6, 128, 352, 8, 256)
LLAMA_7B = ModelSpec("llama-7b", "llama", 32, 4096, 11008, 32, 32000)


def test_options_are_ordered_legal_and_lie_on_the_nodes() -> None:
    cluster = Cluster((Node("a", 4, "A100"), Node("b", 4, "A100"), Node("c", 2, "H100")))
    curve = scaling_curve(LLAMA_7B, cluster, global_batch=48, sequence_length=2048)
    keys = [(o.device_type, o.num_devices, len(o.shape)) for o in curve.options]
    assert keys == sorted(keys)
    assert {o.device_type for o in curve.options} == {"A100", "H100"}
    for option in curve.options:
        check_layout(option.layout, LLAMA_7B, 48, 2048)
        assert option.layout.num_ranks == option.num_devices
        assert option.layout.layers_per_stage, "curves hold resolved layouts"


def test_more_emulated_devices_are_faster_with_diminishing_gain() -> None:
    curve = scaling_curve(
        TINY, parse_cluster_shorthand("2x4:cpu"), global_batch=48, sequence_length=64, precision="fp32"
    )
    best = {o.num_devices: o.step_s for o in reversed(curve.options)}
    assert set(best) == set(range(1, 9))
    assert best[8] < best[4] < best[2] < best[1]  # counts that do not divide the batch may lie above their neighbours
    efficiency = [best[1] / (n * best[n]) for n in (1, 2, 4, 8)]
    assert all(later < earlier for earlier, later in pairwise(efficiency))


def test_what_does_not_fit_is_not_offered() -> None:
    curve = scaling_curve(LLAMA_7B, parse_cluster_shorthand("1x8:A100"), global_batch=64, sequence_length=4096)
    assert min(o.num_devices for o in curve.options) > 1  # 7 B x 18 bytes is more than one device holds
    for option in curve.options:
        e = estimate_step(LLAMA_7B, option.layout, "A100", global_batch=64, sequence_length=4096)
        assert e.peak_p90_bytes <= 80e9


def test_same_contents_same_object() -> None:
    cluster = parse_cluster_shorthand("2x4:cpu")
    first = scaling_curve(TINY, cluster, global_batch=48, sequence_length=64, precision="fp32")
    assert scaling_curve(TINY, cluster, global_batch=48, sequence_length=64, precision="fp32") is first
    other = scaling_curve(TINY, cluster, global_batch=24, sequence_length=64, precision="fp32")
    assert other.version != first.version


def test_fixed_layout_and_range_are_honoured() -> None:
    cluster = parse_cluster_shorthand("2x4:cpu")
    fixed = Layout(tp=2, pp=3)
    curve = scaling_curve(TINY, cluster, global_batch=48, sequence_length=64, precision="fp32", layout=fixed)
    assert {o.layout for o in curve.options} == {fixed.resolve(TINY)}
    ranged = scaling_curve(
        TINY, cluster, global_batch=48, sequence_length=64, precision="fp32", min_devices=3, max_devices=5
    )
    assert {o.num_devices for o in ranged.options} == {3, 4, 5}


def test_a_job_that_asks_for_an_unknown_type_is_told_the_known_ones() -> None:
    with pytest.raises(SpecError, match="known: V100"):
        scaling_curve(
            TINY, parse_cluster_shorthand("1x8:H100"), global_batch=8, sequence_length=64, device_type="H1000"
        )


@pytest.mark.parametrize("asked", ["H100", "h100-sxm", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("written", ["H100", "H100-SXM5-80GB", "h100"])
def test_any_name_of_a_type_finds_its_nodes(asked: str, written: str) -> None:
    cluster = parse_cluster_shorthand(f"2x8:{written}")
    curve = scaling_curve(TINY, cluster, global_batch=8, sequence_length=64, device_type=asked)
    assert {option.device_type for option in curve.options} == {written}
    command = command_curve(cluster, 8, 60.0, asked)
    assert {option.device_type for option in command.options} == {written}


def test_nodes_of_unknown_types_are_no_options() -> None:
    """They run commands, which need no price."""
    curve = scaling_curve(TINY, parse_cluster_shorthand("1x8:H1000"), global_batch=8, sequence_length=64)
    assert curve.options == ()


def test_shapes() -> None:
    assert shapes_of(6, [4, 4, 4, 4]) == [(4, 2)]
    assert shapes_of(4, [4, 4]) == [(4,), (2, 2)]
    assert shapes_of(9, [4, 4]) == []


def test_a_curve_to_1024_devices_is_quick() -> None:
    cluster = parse_cluster_shorthand("128x8:H100")
    best = min(
        _timed(lambda: scaling_curve(LLAMA_7B, cluster, global_batch=1024, sequence_length=4096)) for _ in range(12)
    )
    assert best < 0.1


def _timed(call) -> float:  # type: ignore[no-untyped-def]
    started = time.process_time()
    call()
    return time.process_time() - started
