"""Messages arrive whole and in order, in pieces of any size; a hub never blocks on a peer that does not read."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from suika.runtime.messages import Channel, DisconnectedError, connect, listen


def _pair() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    return Channel(ours), theirs


def test_messages_arrive_whole_and_in_order() -> None:
    channel, wire = _pair()
    for byte in b'{"n":1}\n{"n":2}\n{"n"':
        wire.send(bytes([byte]))
    assert [channel.receive(1)["n"], channel.receive(1)["n"]] == [1, 2]
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    wire.send(b":3}\n")
    wire.close()
    assert channel.receive(1) == {"n": 3}
    with pytest.raises(DisconnectedError):
        channel.receive(1)


def test_what_was_sent_before_the_end_is_not_lost() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.send(b'{"n":1}\n{"n":2}\n')
    theirs.close()
    arrived = Channel(ours).arrived()
    assert [next(arrived)["n"], next(arrived)["n"]] == [1, 2]
    with pytest.raises(DisconnectedError):
        next(arrived)


def test_posting_to_a_peer_that_does_not_read_never_blocks() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    sender, receiver = Channel(ours), Channel(theirs)
    big = {"text": "x" * 1_000_000}
    sender.post(big)
    assert sender.has_outgoing
    while sender.has_outgoing:
        theirs.setblocking(False)
        list(receiver.arrived()) or None
        sender.flush()
    sender.post({"n": 1})


def test_not_a_number_is_refused() -> None:
    channel, _ = _pair()
    with pytest.raises(ValueError, match="not JSON compliant"):
        channel.send({"loss": float("nan")})


def test_sockets_work_at_paths_of_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    path = folder / "some.sock"
    with listen(path) as server, connect(path) as client:
        accepted, _ = server.accept()
        with accepted:
            Channel(client).send({"n": 1})
            assert Channel(accepted).receive(1) == {"n": 1}
    assert path.stat().st_mode & 0o077 == 0
