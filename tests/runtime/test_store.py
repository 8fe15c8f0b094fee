"""A job's rendezvous: no port is chosen before it is bound, and nobody joins another job's store."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from suika.backends.local import LocalBackend
from suika.runtime.gang import STORE_ENTRY
from suika.runtime.store import StoreRefusedError, join


@contextmanager
def _stores(backend: LocalBackend, num: int) -> Iterator[dict[str, dict[str, Any]]]:
    """`num` stores started at once: token -> what it said."""
    said: dict[str, dict[str, Any]] = {}
    tokens = [secrets.token_hex(8) for _ in range(num)]
    all_there = threading.Event()

    def listener(token: str) -> Any:
        def listen(event: dict[str, Any]) -> None:
            if event["event"] == "message":
                said[token] = event["message"]
            if len(said) == num:
                all_there.set()

        return listen

    for token in tokens:
        backend.spawn(f"store-{token}", "a", STORE_ENTRY, {"token": token}, listener(token))
    assert all_there.wait(20)
    yield said
    for token in tokens:
        backend.kill(f"store-{token}")


@pytest.mark.parametrize("rounds", [2, pytest.param(50, marks=(pytest.mark.long, pytest.mark.timeout(600)))])
def test_many_jobs_start_at_once(backend: LocalBackend, rounds: int) -> None:
    """B58."""
    for _ in range(rounds):
        with _stores(backend, 8) as said:
            assert len({message["port"] for message in said.values()}) == 8
            for token, message in said.items():
                store = join(message["host"], message["port"], token, timeout_s=10)
                store.set("who", token)
                assert store.get("who").decode() == token


def test_another_jobs_rank_is_refused(backend: LocalBackend) -> None:
    with _stores(backend, 1) as said:
        (message,) = said.values()
        with pytest.raises(StoreRefusedError, match="another job"):
            join(message["host"], message["port"], "not its token", timeout_s=10)


def test_whoever_else_listens_there_is_refused() -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        began_s = time.monotonic()
        with pytest.raises(StoreRefusedError, match="nothing like a store"):
            join("127.0.0.1", thief.getsockname()[1], "token", timeout_s=2)
        assert time.monotonic() - began_s < 10
