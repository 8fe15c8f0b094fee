"""The door of agents: one acknowledgement for many frames, and no connection that outlives its token."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from test_agents import Notes
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from suika.agent.link import PROTOCOL
from suika.control import agent_door
from suika.control.accounts import Accounts
from suika.control.agents import AgentHub
from suika.control.auth import Role
from suika.control.engines import open_engine
from suika.control.migrate import migrate
from suika.control.netdoor import NetDoor


@pytest.fixture
def door(tmp_path: Path) -> Iterator[SimpleNamespace]:
    engine = open_engine(f"sqlite:///{tmp_path}/accounts.db")
    migrate(engine)
    accounts = Accounts(engine)
    accounts.add("node", Role.NODE)
    hub, app = AgentHub(Notes(), lease_s=60.0), FastAPI()
    agent_door.install_agents(app, hub, accounts)
    net = NetDoor(app, "127.0.0.1", 0)
    yield SimpleNamespace(url="ws" + net.url.removeprefix("http") + "/v1/agents", accounts=accounts, hub=hub)
    net.close()
    engine.dispose()


@contextmanager
def joined(door: SimpleNamespace) -> Iterator[ClientConnection]:
    headers = {"Authorization": f"Bearer {door.accounts.issue('node')}"}
    node = {"name": "n0", "num_devices": 4, "device_type": "cpu"}
    hello = {"protocol": PROTOCOL, "node": node, "incarnation": "a", "controller": None, "received": 0}
    with connect(door.url, additional_headers=headers, ping_interval=None, compression=None) as connection:
        connection.send(json.dumps(hello))
        assert json.loads(connection.recv(10))["resumes"] is False
        yield connection


def test_many_frames_are_acknowledged_together(door: SimpleNamespace) -> None:
    with joined(door) as connection:
        for number in range(1, 201):
            event: Any = {"event": "hello", "processes": []}
            connection.send(json.dumps({"n": number, "ack": 0, "m": event}))
        acknowledged = [json.loads(connection.recv(10))["ack"]]
        while acknowledged[-1] < 200:
            acknowledged.append(json.loads(connection.recv(10))["ack"])
        assert len(acknowledged) < 50


def test_a_connection_ends_with_its_token(door: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_door, "_RECHECK_S", 0.2)
    with joined(door) as connection:
        assert door.hub.nodes == {"n0": True}
        with pytest.raises(TimeoutError):
            connection.recv(0.6)  # looked at, and still good
        door.accounts.revoke("node")
        with pytest.raises(ConnectionClosed, match="not good any more"):
            connection.recv(10)


def test_headers_without_end_are_not_taken_in(door: SimpleNamespace) -> None:
    """Before any token was looked at."""
    host, port = door.url.removeprefix("ws://").partition("/")[0].split(":")
    with socket.create_connection((host, int(port)), timeout=10) as stranger:
        header = b"x-more: " + b"a" * (1 << 20) + b"\r\n"
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n" + 64 * header)
