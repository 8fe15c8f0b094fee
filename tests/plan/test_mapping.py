"""Where a gang stands: tensor-parallel groups inside domains, tight fits, few evictions."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from suika.core.cluster import Cluster, Node, parse_cluster_shorthand
from suika.core.layout import Layout
from suika.core.mesh import Mesh
from suika.plan.mapping import choose_nodes, map_ranks
from suika.plan.ordering import fabric


def inventory(rng: np.random.Generator) -> Cluster:
    """Nodes of several sizes and domains, racks and pods listed interleaved."""
    nodes = []
    for i in range(int(rng.integers(1, 7))):
        size = int(rng.choice([4, 8, 8, 16]))
        nodes.append(Node(f"n{i}", size, "H100", int(rng.choice([size, size // 2])), rack=f"r{i % 2}", pod=f"p{i % 3}"))
    return Cluster(tuple(nodes))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_b72_tensor_parallel_groups_stay_inside_a_domain(seed: int):
    """Random inventories with broken devices: as many groups as fit lie inside one domain, in any device order."""
    rng = np.random.default_rng(seed)
    here = fabric(inventory(rng))
    working = [p for p in range(here.num_devices) if rng.random() > 0.15]
    tp = int(rng.choice([1, 2, 4]))
    num_groups = len(working) // tp
    if not num_groups:
        return
    chosen = rng.permutation(working)[: num_groups * tp].tolist()
    layout = Layout(tp=tp, dp=num_groups)
    ranks = map_ranks(layout, chosen, here)
    assert sorted(ranks) == sorted(chosen)
    assert ranks == map_ranks(layout, sorted(chosen), here), "the order in which devices are listed must not matter"
    mesh = Mesh(layout)
    groups = [mesh.group(dp * tp, "tp") for dp in range(num_groups)]
    inside = sum(len({here.domain_of[ranks[r]] for r in group}) == 1 for group in groups)
    whole = Counter(int(here.domain_of[p]) for p in chosen)
    assert inside == sum(num // tp for num in whole.values())
    # What does not fit into a domain fits into a node wherever a node has enough left.
    in_node = sum(len({here.node_of[ranks[r]] for r in group}) == 1 for group in groups)
    left = Counter(int(here.node_of[p]) for p in chosen)
    for domain, num in whole.items():
        left[domain // 1024] -= num // tp * tp
    assert in_node == inside + sum(num // tp for num in left.values())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_nodes_are_chosen_tightly_and_never_twice(seed: int):
    rng = np.random.default_rng(seed)
    available = rng.integers(0, 9, 6).astype(np.int64)
    occupied = np.minimum(rng.integers(0, 9, 6), available).astype(np.int64)
    shape = tuple(sorted(rng.integers(1, 9, int(rng.integers(1, 4))).tolist(), reverse=True))
    found = choose_nodes(shape, available, occupied)
    possible = all(part <= size for part, size in zip(shape, sorted(available.tolist(), reverse=True), strict=False))
    assert (found is not None) == possible
    if found is None:
        return
    nodes, taken = found
    assert len(set(nodes)) == len(shape)
    assert all(available[node] >= part for node, part in zip(nodes, shape, strict=True))
    free = available - occupied
    assert taken == sum(max(part - free[node], 0) for node, part in zip(nodes, shape, strict=True))
    if len(shape) == 1 and taken == 0:
        assert free[nodes[0]] - shape[0] <= min(
            (available[n] - shape[0] for n in range(6) if free[n] >= shape[0]), default=9
        )


def test_own_nodes_come_first():
    available, none = np.array([8, 8, 8]), np.zeros(3, dtype=np.int64)
    assert choose_nodes((4,), available, none, own=np.array([0, 0, 4])) == ((2,), 0)
    # But not at the price of evicting others.
    assert choose_nodes((4,), available, np.array([0, 8, 8]), own=np.array([0, 0, 2])) == ((0,), 0)


def test_the_walk_keeps_racks_together():
    nodes = tuple(Node(f"n{i}", 2, "H100", rack=f"r{i % 2}") for i in range(4))
    here = fabric(Cluster(nodes))
    assert [device.node for device in here.devices] == ["n0", "n0", "n2", "n2", "n1", "n1", "n3", "n3"]
    assert here.first.tolist() == [0, 2, 4, 6]
    assert fabric(parse_cluster_shorthand("2x8:cpu")).sizes_of("cpu") == (8, 8)
    assert here.sizes_of("A100") == ()
