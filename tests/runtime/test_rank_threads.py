"""A rank's threads: the main one trains, saves and copies; the coordinator's word comes on another, at any time."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from suika.runtime import copier, saver
from suika.runtime.copier import Copier
from suika.runtime.handover import AbortedError, Handover
from suika.runtime.profiler import STEADY
from suika.runtime.saver import Saver
from suika.runtime.worker import Rank

RUNS_S = 0.7
LIVE: Any = SimpleNamespace(
    number=1, rank=0, plan=None, program=SimpleNamespace(records=dict, buffers=dict)
)  # a generation that trains


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads give way every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_snapshot_is_published_while_the_next_one_is_taken(restless: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as can be: none is in the way of another, and the last one is published."""
    monkeypatch.setattr(saver, "snapshot", _Nowhere)
    written, published = threading.Semaphore(0), []

    def say(what: str, generation: int, step: int, **content: object) -> None:
        if what == "published":
            published.append(step)
        else:
            written.release()

    job: Any = SimpleNamespace(shape=None, snapshots=None, job_id="j")
    rank, last, stopped = Saver(job, say), 0, False

    def coordinate() -> None:
        while not stopped or last not in published:
            if written.acquire(timeout=0.05):
                rank.publish(1, last)

    coordinator = threading.Thread(target=coordinate, daemon=True)
    coordinator.start()
    end_s = time.monotonic() + RUNS_S
    while time.monotonic() < end_s:
        last += 1
        rank.save(LIVE, last)
    rank.join()
    written.release()
    stopped = True
    coordinator.join(10)
    assert last in published


class _Nowhere:
    """Snapshots that cost nothing, in the place of the module."""

    @staticmethod
    def capture(shape: Any, plan: Any, rank: int, step: int, records: Any, buffers: Any) -> Any:
        return SimpleNamespace(step=step)

    @staticmethod
    def folder_of(folder: Path, step: int, generation: int) -> str:
        return str(step)

    @staticmethod
    def write(*_: object) -> None: ...

    @staticmethod
    def publish(*_: object) -> None: ...


def test_a_copy_that_was_voted_for_is_made_though_another_order_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a step takes long its coordinator may ask again while the ranks' votes are being counted."""
    rooms, filled, given = threading.Semaphore(1), [], []
    share = SimpleNamespace(num_bytes=8)

    def room(num_bytes: int) -> object:
        rooms.acquire()
        return object()

    monkeypatch.setattr(copier, "shares", lambda shape, plan: [share])
    monkeypatch.setattr(copier, "room", room)
    monkeypatch.setattr(copier, "fill", lambda memory, share, buffers: filled.append(memory))
    monkeypatch.setattr(copier, "give", lambda line, header, memory: given.append((line, memory)))
    monkeypatch.setattr(Copier, "_header", lambda *_: {})
    job: Any = SimpleNamespace(shape=None, device=SimpleNamespace(node="a"))
    rank = Copier(job, lambda *said, **content: pytest.fail(f"{said} {content}"))
    _order(rank, "first")
    assert rank.wants(LIVE)
    rank.prepare(_holders("second"), LIVE)  # on the control thread; there is no room for it yet
    rank.copy(LIVE, 7)
    rooms.release()
    _until(lambda: rank.wants(LIVE), "the second order to be prepared")
    rank.copy(LIVE, 8)
    assert not rank.wants(LIVE)
    _until(lambda: len(given) == 2, "both to be handed over")
    assert [line for line, _ in given] == ["first", "second"]
    assert [memory for _, memory in given] == filled
    assert len(set(map(id, filled))) == 2


def test_a_move_that_was_called_off_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is prepared, samples are of training beside a move; afterwards they are of training again."""
    called_off, said = threading.Event(), []

    def build(self: Handover) -> None:
        called_off.wait(10)
        raise AbortedError

    monkeypatch.setattr(Handover, "_build", build)
    channel: Any = SimpleNamespace(send=lambda message: said.append(message["say"]))
    rank = Rank(channel, SimpleNamespace(job_id="j"))  # type: ignore[arg-type]
    assert rank._beside() == STEADY
    rank._hear({"do": "prepare", "generation": 2})
    assert rank._beside() == "move"
    rank._hear({"do": "abort", "generation": 2})
    called_off.set()
    _until(lambda: "resumed" in said, "the old generation")
    assert rank._beside() == STEADY


def _order(rank: Copier, line: str) -> None:
    rank.prepare(_holders(line), LIVE)
    _until(lambda: not rank.is_busy, f"{line} to be prepared")


def _holders(line: str) -> dict[str, Any]:
    return {"generation": 1, "holders": {"a": {"line": line}}}


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.001)
