"""The agent: one node's connection to its controller, which brings orders and takes away what happens on the node.

It connects out, so that nodes need no open port, and only to its controller (TLS checked, node token shown). It may be
restarted at any time: the processes belong to the fork server, which it finds again. While no controller is in touch,
processes train on until the fork server's orphan limit; the agent says `seen` to it for every sign of life.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from suika.agent import lock
from suika.agent.condition import Condition
from suika.agent.forks import Forks
from suika.agent.inventory import Inventory
from suika.agent.link import PROTOCOL, LinkError
from suika.agent.news import News
from suika.agent.orders import Orders
from suika.agent.outbox import Outbox
from suika.agent.rules import Rules
from suika.core.cluster import Node
from suika.runtime.rooms import NodeMemory

PATH = "/v1/agents"
_RETRY_S = (0.2, 5.0)  # first and longest wait between attempts
_MAX_FRAME_BYTES = 4 << 20
_BEATS_PER_LEASE = 6


class RefusedError(RuntimeError):
    """This agent must not serve: its token is not a node's, or its folder has an agent. Trying again will not help."""


class Agent:
    """`run` until `stop`. `rules`: what is started; nothing else is, whatever the controller says. `memory`: what the
    node has of it now; None: it does not say, and keeps copies of its own jobs' state alone."""

    def __init__(
        self,
        url: str,
        token: str,
        node: Node,
        folder: Path,
        forks: Forks,
        inventory: Inventory,
        ca: Path | None = None,
        rules: Rules | None = None,
        memory: Callable[[], NodeMemory] | None = None,
    ) -> None:
        self._url = "ws" + url.removeprefix("http").rstrip("/") + PATH
        self._token = token
        self.node = node
        self._logs = folder / "logs"
        self._tls = ssl.create_default_context(cafile=str(ca) if ca else None) if url.startswith("https") else None
        self._incarnation = secrets.token_hex(8)
        self._controller: str | None = None
        self._forks = forks
        self._forks_ended = False
        self._outbox = Outbox(lambda number: forks.order({"do": "replay", "number": number}))
        self._condition = Condition(inventory, memory, self._outbox)
        self._news = News(inventory.checks, self._condition, self._outbox)
        rules = rules or Rules()
        self._orders = Orders(node.name, self._logs, rules, forks, self._news.roll, self._outbox, self._note)
        self._connection: ClientConnection | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        """Serve until `stop`. Raises `RefusedError`, or `ForksError` if there can be no processes here."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (held := lock.take(self._logs.parent)) is None:
            raise RefusedError(f"another agent serves from {self._logs.parent}")
        if self._news.waits:
            threading.Thread(target=self._news.run, name="news", daemon=True).start()
        try:
            self._serve_until_stopped()
        finally:
            self._forks.close()
            self._news.end()
            os.close(held)

    def _serve_until_stopped(self) -> None:
        self._start_forks()
        wait_s = _RETRY_S[0]
        while not self._stopped.is_set():
            began_s = time.monotonic()
            try:
                self._connect()
            except (OSError, WebSocketException, LinkError, TimeoutError) as error:
                if isinstance(error, InvalidStatus) and error.response.status_code in (401, 403):
                    raise RefusedError(f"the controller refuses the token ({error.response.status_code})") from None
                if not self._stopped.is_set():
                    self._note(f"no controller: {type(error).__name__}: {error}")
            finally:
                self._outbox.disconnect()
            wait_s = _RETRY_S[0] if time.monotonic() - began_s > 10 else min(wait_s * 2, _RETRY_S[1])
            self._stopped.wait(wait_s * random.uniform(0.5, 1.0))

    def stop(self) -> None:
        """Leave; processes live on and another agent takes them over. Waits for nobody, as a signal's handler must."""
        self._stopped.set()
        if self._connection is not None:
            with suppress(OSError):
                self._connection.socket.shutdown(socket.SHUT_RDWR)

    # -- one connection -----------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        with connect(
            self._url,
            ssl=self._tls,
            additional_headers=headers,
            max_size=_MAX_FRAME_BYTES,
            open_timeout=20,
            close_timeout=2,
            ping_interval=None,  # signs of life are ours
            compression=None,
        ) as connection:
            self._connection = connection
            lease_s = self._greet(connection)
            # A controller that hangs must not keep us in the midst of a send: then it is as if it were silent.
            patience = struct.pack("ll", math.ceil(lease_s), 0)
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
            self._note(f"connected to controller {self._controller}")
            self._serve(connection, lease_s)

    def _greet(self, connection: ClientConnection) -> float:
        """Introduce the node; go on where this controller and this agent were, or begin anew. Returns the lease."""
        hello = {
            "protocol": PROTOCOL,
            "node": asdict(self.node),
            "incarnation": self._incarnation,
            "controller": self._controller,
            "received": self._outbox.received,
        }
        connection.send(json.dumps(hello))
        answer = json.loads(connection.recv(20))
        if "refused" in answer:
            raise LinkError(f"refused: {answer['refused']}")
        resumes = answer["resumes"]
        self._controller = answer["controller"]
        self._outbox.connect(lambda frame: connection.send(json.dumps(frame)), answer["received"], resumes=resumes)
        if not resumes:
            self._condition.tell()
        return float(answer["lease_s"])

    def _serve(self, connection: ClientConnection, lease_s: float) -> None:
        beat_s = lease_s / _BEATS_PER_LEASE
        heard_s = beaten_s = time.monotonic()
        owes = False  # an acknowledgement: one for all orders that come together
        while not self._stopped.is_set():
            try:
                text = connection.recv(0.0 if owes else beat_s)
            except TimeoutError:
                text = None
            if text is None and owes:
                self._outbox.beat()
                owes = False
                continue
            now = time.monotonic()
            if text is not None:
                heard_s = now
                order = self._outbox.take(json.loads(text))
                self._forks.order({"do": "seen"})
                if order is not None:
                    self._orders.carry_out(order)
                    owes = True  # soon, so that the controller does not give it to a successor again
            elif now - heard_s > lease_s:
                raise TimeoutError(f"the controller has been silent for {lease_s:.0f} s")
            if text is None or now - beaten_s > beat_s:
                self._condition.look_again()
                self._outbox.beat()
                beaten_s = now
            if self._forks_ended:
                self._restart_forks()

    # -- its fork server ----------------------------------------------------------------------------------------------

    def _start_forks(self) -> None:
        self._forks_ended = False
        self._forks.start(self._news.hear, self._note_end)

    def _note_end(self) -> None:
        self._forks_ended = True

    def _restart_forks(self) -> None:
        """The fork server died, and with it all its processes: say so, by the empty list of a new one."""
        self._note("the fork server is gone; starting another")
        self._start_forks()
        self._outbox.ask_for_everything()

    def _note(self, text: str) -> None:
        print(f"suika agent {self.node.name}: {text}", file=sys.stderr, flush=True)
