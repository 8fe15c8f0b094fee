"""Whoever waits on a watched connection is woken up; connections of others are left alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from suika.runtime.sockets import SocketWatch


def _ends_soon(wait: Callable[[], Any], watch: SocketWatch) -> Any:
    """What a thread blocked in `wait` gets when the watch breaks its connections."""
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append(wait())
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    watch.break_connections()
    thread.join(10)
    assert not thread.is_alive()
    return outcome[0]


def test_a_blocked_receive_ends_and_older_connections_live_on() -> None:
    older = socket.socketpair()
    watch = SocketWatch()
    watched = socket.socketpair()
    watch.close()
    younger = socket.socketpair()
    assert _ends_soon(lambda: watched[0].recv(1), watch) == b""
    for here, there in (older, younger):
        here.send(b"x")
        assert there.recv(1) == b"x"
    for pair in (older, watched, younger):
        for end in pair:
            end.close()


def test_a_blocked_accept_on_a_unix_socket_ends(tmp_path: Path) -> None:
    watch = SocketWatch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(30)
        line, _ = _ends_soon(listener.accept, watch)
        with line:
            assert line.recv(1) == b"", "the caller has hung up"


def test_a_listening_tcp_socket_is_spared() -> None:
    watch = SocketWatch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        watch.break_connections()
        with socket.create_connection(server.getsockname(), timeout=2):
            server.settimeout(2)
            accepted, _ = server.accept()
            accepted.close()


def test_a_number_that_is_used_again_is_not_touched() -> None:
    watch = SocketWatch()
    watched = socket.socketpair()
    watch.close()
    numbers = {end.fileno() for end in watched}
    for end in watched:
        end.close()
    others = socket.socketpair()
    if {end.fileno() for end in others} != numbers:
        pytest.skip("the system gave other numbers")
    watch.break_connections()
    others[0].send(b"x")
    assert others[1].recv(1) == b"x"
    for end in others:
        end.close()
