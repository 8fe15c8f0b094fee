"""One table of names: every name of a type finds it, in clusters, jobs, plans, measured cases and drivers."""

from __future__ import annotations

import pytest

from suika.core.cluster import Cluster, Node
from suika.core.device_names import OTHER_NAMES, canonical, of_driver, plain, same_type
from suika.estimate.catalog import device_type, device_types, resolve

NAMES = [(other, name) for name, others in OTHER_NAMES.items() for other in (name, *others)]


def test_the_table_and_the_catalog_have_the_same_types() -> None:
    assert set(OTHER_NAMES) == set(device_types())


def test_no_name_means_two_types() -> None:
    spelled = [plain(name) for name, _ in NAMES]
    assert len(spelled) == len(set(spelled))


@pytest.mark.parametrize(("other", "name"), NAMES)
def test_every_name_finds_its_type_however_it_is_written(other: str, name: str) -> None:
    cluster = Cluster((Node("a", 8, other), Node("b", 8, "TPU-v9")))
    for spelling in (other, other.lower(), other.replace("-", " "), f"NVIDIA {other}"):
        assert canonical(spelling) == name
        assert resolve(spelling).name == name
        assert cluster.types_named(spelling) == (other,)
    assert cluster.types_named(name) == (other,)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("AMD Instinct MI300X", "MI300X"),
        ("", "gpu"),
    ],
)
def test_names_that_drivers_give(said: str, name: str) -> None:
    assert of_driver(said) == name


def test_types_nobody_knows_are_told_apart() -> None:
    cluster = Cluster((Node("a", 8, "TPU-v9"), Node("b", 8, "TPU-v8")))
    assert cluster.types_named("tpu v9") == ("TPU-v9",)
    assert cluster.types_named("H100") == ()
    assert not same_type("TPU-v9", "TPU-v8")


def test_two_spellings_in_one_cluster_are_one_type() -> None:
    cluster = Cluster((Node("a", 8, "H100"), Node("b", 8, "H100-SXM5"), Node("c", 8, "H100-PCIe")))
    assert cluster.types_named("h100-sxm") == ("H100", "H100-SXM5")


def test_a_type_with_facts_of_its_own_is_no_other() -> None:
    """Nodes of two types, one of which the cluster says something of itself: only its own name means it."""
    facts = {"H100-SXM": {"like": "H100", "memory_gb": 94}}
    cluster = Cluster((Node("a", 8, "H100"), Node("b", 8, "H100-SXM")), device_types=facts)
    assert cluster.types_named("H100") == ("H100",)
    assert cluster.types_named("h100 sxm") == ("H100-SXM",) == cluster.types_named("H100-SXM")
    assert device_type("H100", cluster).memory_bytes == resolve("H100").memory_bytes
    assert device_type("H100-SXM", cluster).memory_bytes == 94e9


def test_facts_count_by_whatever_name_they_are_given() -> None:
    facts = {"h100-sxm5": {"memory_gb": 94}}
    cluster = Cluster((Node("a", 8, "H100"),), device_types=facts)
    assert device_type("H100", cluster).memory_bytes == 94e9
    assert cluster.facts_of("A100") is None
