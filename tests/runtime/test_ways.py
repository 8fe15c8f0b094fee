"""Which transport carries a move, by where the state lies; the way itself for state on CPUs."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from suika.reshard.transports import memfd
from suika.reshard.transports.shared import Shared
from suika.runtime.ways import Way, open_way, wire_between

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kind", "nodes", "places", "nccl", "wire"),
    [
        ("cpu", [0, 0, 1], [], False, "gloo"),
        ("cpu", [0], [], False, "none"),
        ("cuda", [0, 1], ["0 GPU-a", "1 GPU-a"], True, "nccl"),
        ("cuda", [0, 0, 1], ["0 GPU-a", "0 GPU-a", "1 GPU-b"], True, "gloo"),  # NCCL refuses two ranks on one device
        ("cuda", [0, 1], ["0 GPU-a", "1 GPU-b"], False, "gloo"),  # somebody lacks NCCL
        ("cuda", [0, 0], ["0 GPU-a", "0 GPU-b"], True, "gloo"),  # one node: CUDA IPC carries all, words go over gloo
    ],
)
def test_the_wire_fits_the_devices(kind: str, nodes: list[int], places: list[str], nccl: bool, wire: str) -> None:
    assert wire_between(kind, nodes, places, nccl) == wire


def test_state_on_cpus_is_shown_inside_a_node_and_sent_between_nodes(tmp_path: Path) -> None:
    ways: dict[int, Way] = {}
    arrived = torch.zeros(1000, dtype=torch.uint8)

    def participant(rank: int) -> None:
        store = dist.FileStore(str(tmp_path / "store"), 3)
        group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 3, timedelta(seconds=20))
        way = ways[rank] = open_way(group, [0, 0, 1], CPU, store, "move", 20.0)
        if rank == 0:
            way.transport.send(2, 0, torch.full((1000,), 7, dtype=torch.uint8)).wait()
        if rank == 2:
            way.transport.recv(0, 0, arrived).wait()
        way.transport.all_gather(b"")
        way.close()

    threads = [threading.Thread(target=participant, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for way in ways.values():
        assert (type(way.transport.near), way.wire, way.make) == (Shared, "gloo", memfd.empty)
    assert (ways[0].transport.neighbours, ways[2].transport.neighbours) == ({1}, set())
    assert bool((arrived == 7).all())
