"""The one conformance suite: what every transport must do, run against each."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from labels import in_threads
from processes import run_forked

from suika.reshard.transports.base import Transport, TransportError, Work
from suika.reshard.transports.cuda_ipc import CudaIpc
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.inprocess import Hub
from suika.reshard.transports.mapped import Shown
from suika.reshard.transports.mixed import Mixed
from suika.reshard.transports.nccl import Nccl
from suika.reshard.transports.shared import Shared, _HostMemory

Body = Callable[[int, Transport], Any]
Runner = Callable[[int, Body], list[Any]]


class FewSlots(_HostMemory):
    """Short pieces, few at a time: what a staging pool of a device imposes."""

    piece_bytes = 100_000

    def __init__(self) -> None:
        self.shown: dict[int, int] = defaultdict(int)

    def show(self, peer: int, piece: torch.Tensor) -> Shown | None:
        if self.shown[peer] == 4:
            return None
        self.shown[peer] += 1
        return super().show(peer, piece)

    def taken(self, peer: int, shown: Shown) -> None:
        self.shown[peer] -= 1


def shared(gloo: Gloo) -> Shared:
    return Shared(gloo.rank, [rank for rank in range(gloo.size) if rank != gloo.rank], gloo.all_gather)


def in_pieces(gloo: Gloo) -> Transport:
    transport = shared(gloo)
    transport.memory = FewSlots()
    return transport


WAYS: dict[str, Callable[[Gloo], Transport]] = {  # between processes; all make themselves known over gloo
    "gloo": lambda gloo: gloo,
    "shared memory": shared,
    "shared memory in pieces": in_pieces,
    "mixed": lambda gloo: Mixed.of(gloo, [rank // 2 for rank in range(gloo.size)]),  # two participants per node
}


def run_threads(size: int, body: Body) -> list[Any]:
    hub, results = Hub(size, timeout_s=10), [None] * size

    def one(rank: int, transport: Transport) -> None:
        results[rank] = body(rank, transport)

    in_threads([partial(one, rank, transport) for rank, transport in enumerate(hub.transports())])
    return results


def no_devices(size: int) -> str:
    """Why a test with `size` participants on devices of their own is skipped, or nothing."""
    found = torch.cuda.device_count()  # asks NVML: forked processes can still initialise CUDA
    return "" if found >= size else f"needs {size} NVIDIA device(s), {found} found"


def cuda_ipc(gloo: Gloo) -> Transport:
    """All participants on one device, each with a small pool: messages go in pieces."""
    peers = [rank for rank in range(gloo.size) if rank != gloo.rank]
    device = torch.device("cuda", 0)
    return CudaIpc(gloo.rank, peers, gloo.all_gather, device, slot_bytes=1 << 20, num_slots=4)


class OnDevice:
    """NCCL for host buffers: the suite's data goes over a device of its own."""

    def __init__(self, gloo: Gloo) -> None:
        self.device = torch.device("cuda", gloo.rank)
        torch.cuda.set_device(self.device)
        store = dist.PrefixStore(
            "nccl", dist.FileStore(gloo.all_gather(f"{tempfile.mkdtemp()}/nccl".encode())[0].decode())
        )
        group = dist.ProcessGroup(store, gloo.rank, gloo.size)
        backend = dist.ProcessGroupNCCL(store, gloo.rank, gloo.size, dist.ProcessGroupNCCL.Options())
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        self.inner = Nccl(group, gloo, self.device, timeout_s=10)
        self.rank, self.size = gloo.rank, gloo.size
        self.all_gather, self.lend = self.inner.all_gather, self.inner.lend

    def send(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        return self.inner.send(peer, tag, buffer.to(self.device))

    def recv(self, peer: int, tag: int, buffer: torch.Tensor) -> Work:
        staged = torch.empty_like(buffer, device=self.device)
        work = self.inner.recv(peer, tag, staged)
        return SimpleNamespace(wait=lambda: (work.wait(), buffer.copy_(staged)))


DEVICE_WAYS: dict[str, tuple[Callable[[Gloo], Transport], int]] = {  # and how many devices each needs
    "cuda ipc": (cuda_ipc, 1),
    "nccl": (OnDevice, 4),
}


@pytest.fixture(params=["in-process", *WAYS, *(pytest.param(way, marks=pytest.mark.gpu) for way in DEVICE_WAYS)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    if request.param == "in-process":
        return run_threads
    if request.param in DEVICE_WAYS:
        make, num_devices = DEVICE_WAYS[request.param]
        if problem := no_devices(num_devices):
            pytest.skip(f"{request.param}: {problem}")
        return lambda size, body: run_forked(size, tmp_path, lambda rank, gloo: body(rank, make(gloo)))
    return lambda size, body: run_forked(size, tmp_path, lambda rank, gloo: body(rank, WAYS[request.param](gloo)))


def pattern(size: int, seed: int) -> torch.Tensor:
    """Random bytes, repeated after a prime number of them."""
    some = torch.randint(0, 256, (min(size, 65_537),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return some.repeat(-(-size // len(some)))[:size]


def test_rank_and_size(run: Runner) -> None:
    def body(_: int, transport: Transport) -> tuple[int, int]:
        transport.all_gather(b"")  # nobody leaves before all have come
        return transport.rank, transport.size

    assert run(3, body) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("num_bytes", [1, 4096, 3_000_001])
def test_both_may_send_first(run: Runner, num_bytes: int) -> None:
    """A swap in which each posts its send before its receive does not deadlock and keeps every byte."""

    def body(rank: int, transport: Transport) -> bool:
        peer, arrived = 1 - rank, torch.zeros(num_bytes, dtype=torch.uint8)
        sending = transport.send(peer, 7, pattern(num_bytes, rank))
        transport.recv(peer, 7, arrived).wait()
        sending.wait()
        return torch.equal(arrived, pattern(num_bytes, peer))

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("num_bytes", [1, 4096, 64 << 20])
def test_both_may_wait_for_their_sends_first(run: Runner, num_bytes: int) -> None:
    def body(rank: int, transport: Transport) -> bool:
        peer, arrived = 1 - rank, torch.zeros(num_bytes, dtype=torch.uint8)
        sending = transport.send(peer, 7, pattern(num_bytes, rank))
        receiving = transport.recv(peer, 7, arrived)
        sending.wait()
        receiving.wait()
        return torch.equal(arrived, pattern(num_bytes, peer))

    assert run(2, body) == [True, True]


def test_a_ring(run: Runner) -> None:
    """Everybody sends to the next and waits for it, then receives from the one before: ten times round."""

    def body(rank: int, transport: Transport) -> bool:
        right, left, held = (rank + 1) % 3, (rank - 1) % 3, pattern(100_003, rank)
        for lap in range(10):
            arrived = torch.zeros_like(held)
            sending, receiving = transport.send(right, lap, held), transport.recv(left, lap, arrived)
            sending.wait()
            receiving.wait()
            held = arrived
        return torch.equal(held, pattern(100_003, (rank - 10) % 3))

    assert run(3, body) == [True] * 3


def test_one_to_many_in_unequal_lists(run: Runner) -> None:
    """Participant 0 sends r messages to participant r, all posted at once; sizes and waiting orders differ."""
    sizes = (1, 70_000, 8)

    def body(rank: int, transport: Transport) -> bool:
        if rank == 0:
            works = [transport.send(r, i, pattern(sizes[i], 10 * r + i)) for r in (3, 2, 1) for i in range(r)]
            for work in works:
                work.wait()
            return True
        arrived = [torch.zeros(sizes[i], dtype=torch.uint8) for i in range(rank)]
        works = [transport.recv(0, i, arrived[i]) for i in range(rank)]
        for work in reversed(works):
            work.wait()
        return all(torch.equal(got, pattern(sizes[i], 10 * rank + i)) for i, got in enumerate(arrived))

    assert run(4, body) == [True] * 4


def test_random_exchanges_end(run: Runner) -> None:
    """Any list of messages that both ends post in one global order and wait for in that order."""
    generator = torch.Generator().manual_seed(1)
    pairs = [tuple(torch.randperm(3, generator=generator)[:2].tolist()) for _ in range(60)]

    def body(rank: int, transport: Transport) -> bool:
        works, expected = [], []
        for i, (src, dst) in enumerate(pairs):
            if src == rank:
                works.append(transport.send(dst, i, pattern(997 * i + 1, i)))
            elif dst == rank:
                expected.append((torch.zeros(997 * i + 1, dtype=torch.uint8), i))
                works.append(transport.recv(src, i, expected[-1][0]))
        for work in works:
            work.wait()
        return all(torch.equal(got, pattern(len(got), i)) for got, i in expected)

    assert run(3, body) == [True] * 3


def test_messages_of_a_pair_match_by_tag_then_order(run: Runner) -> None:
    def body(rank: int, transport: Transport) -> bool:
        if rank == 0:
            works = [transport.send(1, tag, pattern(100, seed)) for tag, seed in ((5, 1), (6, 2), (5, 3))]
            for work in works:
                work.wait()
            return True
        arrived = [torch.zeros(100, dtype=torch.uint8) for _ in range(3)]
        works = [transport.recv(0, tag, buffer) for tag, buffer in zip((6, 5, 5), arrived, strict=True)]
        for work in works:
            work.wait()
        return all(torch.equal(got, pattern(100, seed)) for got, seed in zip(arrived, (2, 1, 3), strict=True))

    assert run(2, body) == [True, True]


def test_a_slice_of_a_live_buffer_is_filled_in_place(run: Runner) -> None:
    def body(rank: int, transport: Transport) -> bool:
        live = torch.full((64,), torch.nan)
        if rank == 0:
            transport.send(1, 0, torch.arange(16.0).view(torch.uint8)).wait()
            return True
        transport.recv(0, 0, live[8:24].view(torch.uint8)).wait()
        return torch.equal(live[8:24], torch.arange(16.0)) and int(live.isnan().sum()) == 48

    assert run(2, body) == [True, True]


def test_gathering_keeps_lengths_and_order(run: Runner) -> None:
    def body(rank: int, transport: Transport) -> list[list[bytes]]:
        return [transport.all_gather(bytes([rank]) * n) for n in (0, rank, 5000 * rank)]

    expected = [[bytes([r]) * n for r in range(3)] for n in (0,)]
    expected += [[bytes([r]) * r for r in range(3)], [bytes([r]) * (5000 * r) for r in range(3)]]
    assert run(3, body) == [expected] * 3


def test_a_dead_peer_raises_at_once(run: Runner) -> None:
    """Participant 0 goes away without a word (in-process: the link is cut); the other is not left hanging."""

    def body(rank: int, transport: Transport) -> float:
        transport.all_gather(b"")
        if rank == 0:
            if hasattr(transport, "hub"):
                threading.Timer(0.2, transport.hub.break_link).start()
            return 0.0  # a forked process exits here, which closes its sockets
        start = time.perf_counter()
        with pytest.raises(TransportError):
            transport.recv(0, 0, torch.zeros(8, dtype=torch.uint8)).wait()
        return time.perf_counter() - start

    assert run(2, body)[1] < 5
