"""The topology tree: walk order, levels, and files that are refused with the field and the fix."""

from __future__ import annotations

import pytest
import yaml

from suika.core.cluster import Cluster, Device, Node, parse_cluster_shorthand
from suika.core.cluster_file import ClusterFile, cluster_from_dict
from suika.core.errors import SpecError


def test_shorthand() -> None:
    cluster = parse_cluster_shorthand("12x8:H100")
    assert cluster.num_devices == 96
    assert cluster.nodes[11].name == "n11"
    assert cluster.devices[8] == Device("n01", 0)
    assert Device.parse(str(cluster.devices[8])) == cluster.devices[8]
    for text in ("8x8", "0x8:H100", "8x0:H100", "8x8:", "axb:c", "8x8:H100;rm"):
        with pytest.raises(SpecError):
            parse_cluster_shorthand(text)


def test_walk_order_keeps_racks_and_pods_together() -> None:
    nodes = [Node(f"n{i}", 2, "H100", rack=f"r{i % 2}", pod=f"p{i // 4}") for i in range(8)]
    cluster = Cluster(tuple(nodes))
    assert [n.name for n in cluster.nodes] == ["n0", "n2", "n1", "n3", "n4", "n6", "n5", "n7"]
    a, b, c, d = Device("n0", 0), Device("n0", 1), Device("n2", 0), Device("n1", 0)
    assert [cluster.level(a, x) for x in (b, c, d)] == ["domain", "rack", "pod"]


def test_nvlink_domains_inside_a_node() -> None:
    cluster = Cluster((Node("n", 8, "V100", domain_size=4),))
    assert cluster.level(Device("n", 0), Device("n", 3)) == "domain"
    assert cluster.level(Device("n", 3), Device("n", 4)) == "node"
    assert [len(d.devices) for d in cluster.domains()] == [4, 4]


def test_file_round_trip_with_counts_and_links() -> None:
    text = """
name: lab
nodes:
  - {name: a, devices: 8, type: A800, count: 3, rack: r1}
  - {name: big, devices: 4, type: H100}
links: {rack: {bandwidth_bytes_per_s: 2.5e10, latency_s: 5e-6}}
"""
    cluster = cluster_from_dict(yaml.safe_load(text))
    assert [n.name for n in cluster.nodes] == ["a0", "a1", "a2", "big"]
    assert cluster_from_dict(cluster.to_dict()) == cluster


def with_facts(facts: dict[str, object]) -> dict[str, object]:
    return {"nodes": [{"name": "a", "devices": 8, "type": "H100"}], "device_types": {"H100": facts}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "must be a mapping"),
        ({"nodes": []}, "at least 1 item"),
        ({"nodes": [{"name": "a", "devices": 8}]}, r"nodes\.0\.type"),
        ({"nodes": [{"name": "a", "devices": "8", "type": "x"}]}, "valid integer"),
        ({"nodes": [{"name": "../a", "devices": 8, "type": "x"}]}, "letters, digits"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x", "gpus": 1}]}, "gpus"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x"}] * 2}, "unique"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x"}], "links": {"moon": {}}}, "moon"),
        (
            {"nodes": [{"name": "a", "devices": 8, "type": "x"}], "links": {"pod": {"bandwidth_bytes_per_s": -1}}},
            "greater than or equal to 1",
        ),
        (with_facts({"peak_tflops": {"bf16": 989e12}}), "peak_tflops.bf16.*less than"),  # FLOP/s
        (with_facts({"peak_tflops": {"int3": 100}}), "int3"),
        (with_facts({"memory_gb": 80e9}), "memory_gb.*less than"),  # bytes
        (with_facts({"memory_gb": 1e-300}), "memory_gb.*greater than"),
        (with_facts({"memory_gb": float("nan")}), "memory_gb.*finite"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x"}], 1: 2}, "cluster"),
        ({"nodes": [{"name": "a", "devices": True, "type": "x"}]}, "valid integer"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x", 1: 2}]}, "cluster.nodes.0"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x"}], "links": 5}, "valid dictionary"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x"}], "z": 3}, "known: name, nodes, links, device_types"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x", "z": 3}]}, "known: name, devices, type"),
        ({"nodes": [{"name": "a", "devices": 8, "type": "x", "count": 0}]}, "greater than or equal to 1"),
        ({"nodes": [{"name": "a", "devices": 8, "type": None}]}, "valid string"),
    ],
)
def test_bad_files_are_refused(data: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        cluster_from_dict(data)


def test_the_schema_is_exported() -> None:
    schema = ClusterFile.model_json_schema()
    assert schema["required"] == ["nodes"]
    assert schema["$defs"]["NodeEntry"]["properties"]["devices"]["maximum"] == 1024
