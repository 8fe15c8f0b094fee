"""Memory that processes of a host show each other: adopted as it is, freed with its last user, never half-read."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from processes import run_forked

from suika.reshard.transports import memfd
from suika.reshard.transports.base import TransportError
from suika.reshard.transports.gloo import Gloo
from suika.reshard.transports.mixed import Mixed
from suika.reshard.transports.shared import Shared


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_bytes() -> int:
    """Memory of this process that it shares with others."""
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssShmem"))) * 1024


def near(gloo: Gloo) -> Shared:
    return Shared(gloo.rank, [rank for rank in range(gloo.size) if rank != gloo.rank], gloo.all_gather, timeout_s=20)


def test_tensors_are_plain_and_go_with_their_last_view() -> None:
    descriptors, before = open_descriptors(), shared_bytes()
    weight = memfd.empty((512, 1024), torch.float32)
    assert shared_bytes() - before >= 2 << 20, "pages are there from the start"
    parameter = torch.nn.Parameter(weight.fill_(1.0))
    parameter.sum().backward()
    parameter.data.sub_(parameter.grad, alpha=0.5)
    assert torch.equal(weight, torch.full_like(weight, 0.5))
    view = weight[3]
    del weight, parameter
    assert float(view.sum()) == pytest.approx(512.0)
    del view
    assert (open_descriptors(), shared_bytes()) == (descriptors, before)


def test_only_memory_of_its_own_has_a_span() -> None:
    assert memfd.span_of(torch.zeros(8)) is None
    placed = memfd.placed(torch.arange(1000.0))
    assert memfd.placed(placed) is placed
    span = memfd.span_of(placed[700:])
    assert span is not None
    assert (span.offset, span.num_bytes) == (2800, 1200)
    assert torch.equal(memfd.glance(span).view(torch.float32), torch.arange(700.0, 1000.0))
    assert memfd.placed(torch.empty(0)).numel() == 0


def test_memory_that_is_not_there_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would overcommit and then kill something, so it must not even be asked."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("the kernel was asked"))
    with pytest.raises(MemoryError, match="are available"):
        memfd.empty((1 << 46,), torch.uint8)


def test_a_buffer_changes_process_without_a_copy(tmp_path: Path) -> None:
    """Participant 1 adopts a buffer; after participant 0 has let go, it trains on in the very same pages."""

    def body(rank: int, gloo: Gloo) -> tuple[list[float], int, int]:
        transport = near(gloo)
        mine = {"w": memfd.placed(torch.full((1 << 20,), float(rank + 1))), "none": torch.empty(0)}
        lent = transport.lend(mine)
        assert lent[1 - rank].view("none").numel() == 0
        assert torch.equal(lent[1 - rank].view("w"), torch.full((1 << 20,), float(2 - rank)))
        adopted = lent[1 - rank].adopt("w") if rank == 1 else None
        transport.all_gather(b"seen")  # acknowledge before release
        del lent
        inode = os.fstat(memfd.span_of(mine["w"]).fd).st_ino if rank == 0 else 0  # type: ignore[union-attr]
        mine.clear()
        transport.all_gather(b"released")
        values = []
        if adopted is not None:
            adopted.mul_(3.0)
            inode = os.fstat(memfd.span_of(adopted).fd).st_ino  # type: ignore[union-attr]
            values = [float(adopted.min()), float(adopted.max())]
        held = shared_bytes()
        del adopted
        return values, inode, held - shared_bytes()

    (_, old_inode, nothing), (values, inode, held) = run_forked(2, tmp_path, body)
    assert values == [3.0, 3.0]
    assert inode == old_inode, "the same memory, not a copy of it"
    assert nothing == 0
    assert held == 4 << 20


def test_one_may_lend_again_before_the_other_has_seen_the_first(tmp_path: Path) -> None:
    def body(rank: int, gloo: Gloo) -> list[list[float]]:
        transport, seen = near(gloo), []
        for lap in range(30):
            if (lap + rank) % 7 == 0:
                time.sleep(0.01)
            lent = transport.lend({"a": memfd.placed(torch.full((4,), float(lap)))})
            seen.append(lent[1 - rank].view("a").tolist())
        transport.all_gather(b"seen")
        return seen

    assert run_forked(2, tmp_path, body) == [[[float(lap)] * 4 for lap in range(30)]] * 2


def test_what_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    def body(_: int, gloo: Gloo) -> bool:
        with pytest.raises(ValueError, match=r"memfd\.placed"):
            near(gloo).lend({"w": torch.zeros(4)})
        return True

    assert run_forked(2, tmp_path, body) == [True, True]


def test_participants_apart_fall_back_to_the_wire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be reached (here: it takes the other for another user's process) takes its whole node along."""

    def body(rank: int, gloo: Gloo) -> tuple[bool, int]:
        if rank == 1:
            monkeypatch.setattr(os, "getuid", lambda: 12345)
        transport = Mixed.of(gloo, [0, 0, 1, 1])
        arrived = torch.zeros(9, dtype=torch.uint8)
        sending = transport.send(rank ^ 1, 0, torch.full((9,), rank, dtype=torch.uint8))
        transport.recv(rank ^ 1, 0, arrived).wait()
        sending.wait()
        return transport.near is None, int(arrived.sum())

    assert run_forked(4, tmp_path, body) == [(True, 9), (True, 0), (False, 27), (False, 18)]


def test_twenty_rounds_leave_descriptors_and_memory_flat(tmp_path: Path) -> None:
    def body(rank: int, gloo: Gloo) -> list[tuple[int, int]]:
        held = memfd.placed(torch.full((1 << 16,), float(rank)))
        seen = []
        for _ in range(20):
            transport = near(gloo)
            lent = transport.lend({"held": held})
            arrived = torch.zeros(1 << 18, dtype=torch.uint8)
            sending = transport.send(1 - rank, 0, torch.ones(1 << 18, dtype=torch.uint8))
            transport.recv(1 - rank, 0, arrived).wait()
            sending.wait()
            adopted = lent[1 - rank].adopt("held")
            transport.all_gather(b"")
            held = adopted
            del lent, adopted
            transport.close()
            gloo.all_gather(b"")
            seen.append((open_descriptors(), shared_bytes()))
        return seen

    for seen in run_forked(2, tmp_path, body):
        assert max(seen[1:]) <= seen[0], seen


def test_messages_of_different_lengths_are_noticed_by_both(tmp_path: Path) -> None:
    def body(rank: int, gloo: Gloo) -> str:
        transport = near(gloo)
        buffer = torch.zeros(8 + rank, dtype=torch.uint8)
        work = transport.recv(0, 0, buffer) if rank else transport.send(1, 0, buffer)
        with pytest.raises(TransportError, match="sent 8 bytes, expected 9") as raised:
            work.wait()
        return str(raised.value)

    assert all(run_forked(2, tmp_path, body))


def test_a_peer_killed_in_the_middle_of_a_copy(tmp_path: Path) -> None:
    """What was shown before the kill is whole and may be used; what was not yet shown raises, at once."""
    context = multiprocessing.get_context("fork")
    rendezvous = context.Queue()
    victim_pid, ready = context.Value("i", 0), context.Event()

    def victim() -> None:
        transport = _pair(1, rendezvous, context)
        victim_pid.value = os.getpid()
        transport.lend({"w": memfd.placed(torch.arange(1 << 20, dtype=torch.float32))})
        transport.send(0, 1, torch.full((1 << 20,), 7, dtype=torch.uint8))
        ready.set()
        time.sleep(60)

    process = context.Process(target=victim, daemon=True)
    process.start()
    transport = _pair(0, rendezvous, context)
    lent = transport.lend({})
    assert ready.wait(20)
    half = torch.empty(1 << 20)
    view = lent[1].view("w")
    half[: 1 << 19].copy_(view[: 1 << 19])
    os.kill(victim_pid.value, signal.SIGKILL)
    process.join(10)
    half[1 << 19 :].copy_(view[1 << 19 :])
    assert torch.equal(half, torch.arange(1 << 20, dtype=torch.float32)), "its memory outlives the owner"
    shown = torch.zeros(1 << 20, dtype=torch.uint8)
    transport.recv(1, 1, shown).wait()
    assert bool((shown == 7).all())
    never = torch.zeros(4, dtype=torch.uint8)
    start = time.perf_counter()
    with pytest.raises(TransportError, match="participant 1"):
        transport.recv(1, 2, never).wait()
    assert time.perf_counter() - start < 2
    with pytest.raises(TransportError):
        transport.all_gather(b"verdict")


def _pair(rank: int, names: multiprocessing.Queue, context: object) -> Shared:  # type: ignore[type-arg]
    """Two processes without gloo: names travel over a queue, the survivor's first."""
    mine: list[bytes] = []

    def exchange(payload: bytes) -> list[bytes]:
        mine.append(payload)
        if rank == 1 and len(mine) == 1:
            names.put(payload)
            return [b"", payload]
        return [payload, names.get(timeout=20) if rank == 0 and len(mine) == 1 else b""]

    return Shared(rank, [1 - rank], exchange, timeout_s=20)
