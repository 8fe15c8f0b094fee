"""The device catalog: every spelling is found, unknown ones name their neighbours, cluster files override facts."""

from __future__ import annotations

import pytest

from suika.core.cluster import Cluster, Link, Node
from suika.core.cluster_file import cluster_from_dict
from suika.core.errors import SpecError
from suika.estimate.catalog import Wiring, device_type, device_types, resolve


def test_every_type_has_rates_memory_links_and_a_source() -> None:
    for name, device in device_types().items():
        assert device.peak_flops, name
        assert device.source, name
        assert set(device.links) == {"domain", "node", "rack", "pod"}, name
        assert device.memory_bytes > 1e9, name
        assert device.memory_bytes_per_s > 1e9, name


@pytest.mark.parametrize(
    ("spelling", "name"),
    [("A100-SXM4-80GB", "A100-80GB"), ("h100", "H100"), ("B200-SXM", "B200"), ("GB200 NVL72", "GB200"), ("CPU", "cpu")],
)
def test_spellings(spelling: str, name: str) -> None:
    assert resolve(spelling).name == name


def test_unknown_types_and_precisions_name_the_fix() -> None:
    with pytest.raises(SpecError, match="H100"):
        resolve("H1000")
    with pytest.raises(SpecError, match="bf16"):
        resolve("H100").peak("int3")


def test_a_missing_precision_runs_at_the_next_wider_one() -> None:
    a100 = resolve("A100")
    assert a100.peak("fp8") == a100.peak("bf16")


def test_cluster_files_override_memory_rates_and_links() -> None:
    cluster = cluster_from_dict(
        {
            "nodes": [{"name": "n", "devices": 4, "type": "big", "count": 2}],
            "links": {"rack": {"bandwidth_bytes_per_s": 1e9}},
            "device_types": {"big": {"like": "H100", "memory_gb": 200, "peak_tflops": {"bf16": 500}}},
        }
    )
    big = device_type("big", cluster)
    assert (big.memory_bytes, big.peak("bf16"), big.peak("fp8")) == (200e9, 500e12, 1979e12)
    wiring = Wiring.of(big, cluster)
    assert (wiring.devices_per_node, wiring.domain_size, wiring.network) == (4, 4, Link(1e9, 0.0))
    with pytest.raises(SpecError, match="memory_gb"):
        cluster_from_dict(
            {"nodes": [{"name": "n", "devices": 1, "type": "x"}], "device_types": {"x": {"memory_gb": -1}}}
        )


def test_an_nvl72_domain_spans_its_trays() -> None:
    cluster = Cluster(tuple(Node(f"t{i}", 4, "GB200") for i in range(18)))
    assert Wiring.of(resolve("GB200"), cluster).domain_size == 72
    with pytest.raises(SpecError, match="no node of this type"):
        Wiring.of(resolve("H100"), cluster)
