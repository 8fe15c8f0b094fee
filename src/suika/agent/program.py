"""The agent: one node's connection to its controller, and the hand that carries out the controller's orders.

It connects out, so that nodes need no open port, and only to its controller (TLS checked, node token shown). It may be
restarted at any time: the processes belong to the fork server, which it finds again. While no controller is in touch,
processes train on until the fork server's orphan limit; the agent says `seen` to it for every sign of life.
"""

from __future__ import annotations

import base64
import json
import math
import os
import queue
import random
import secrets
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from suika.agent import lock
from suika.agent.forks import Forks
from suika.agent.inventory import Inventory, with_descendants
from suika.agent.link import PROTOCOL, LinkError, Message, Wire
from suika.agent.roll import RollCall
from suika.agent.rules import Rules
from suika.agent.words import MOST_LOG_BYTES, MOST_LOGS
from suika.core.cluster import Node
from suika.runtime.gang import NOT_STARTED
from suika.runtime.logs import logs_in, path_of, read
from suika.runtime.rooms import NodeMemory

PATH = "/v1/agents"
_RETRY_S = (0.2, 5.0)  # first and longest wait between attempts
_MAX_FRAME_BYTES = 4 << 20
_BEATS_PER_LEASE = 6
_WORTH_TELLING = 64  # a change of so small a part of the memory
CLEAN_WAIT_S = 10.0  # how long a device may take to become idle after its process ended


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
        self._forks = forks
        self._inventory = inventory
        self._tls = ssl.create_default_context(cafile=str(ca) if ca else None) if url.startswith("https") else None
        self._rules = rules or Rules()
        self._memory = memory
        self._told_memory: NodeMemory | None = None
        self._incarnation = secrets.token_hex(8)
        self._controller: str | None = None
        self._lock = threading.Lock()  # of the three that follow
        self._wire = Wire()
        self._replays = 0  # how often the fork server was asked to tell everything anew
        self._awaited: int | None = 0  # the replay that is still to come: until then nothing else is news
        self._forks_ended = False
        self._news: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # that may have to wait; None: the end
        self._roll = RollCall(lambda here: self._tell({"event": "alive", "processes": here}))
        self._pids: dict[str, int] = {}  # of the live processes
        self._looking = threading.Lock()  # at the devices
        self._told_dirty: dict[int, str] = {}
        self._refused: set[str] = set()  # processes that were not started, until they are told to go
        self._connection: ClientConnection | None = None
        self._stopped = threading.Event()

    def run(self) -> None:
        """Serve until `stop`. Raises `RefusedError`, or `ForksError` if there can be no processes here."""
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (held := lock.take(self._logs.parent)) is None:
            raise RefusedError(f"another agent serves from {self._logs.parent}")
        if self._inventory.checks:
            threading.Thread(target=self._pass_on_news, name="news", daemon=True).start()
        try:
            self._serve_until_stopped()
        finally:
            self._forks.close()
            self._news.put(None)
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
                self._wire.disconnect()
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
            "received": self._wire.received,
        }
        connection.send(json.dumps(hello))
        answer = json.loads(connection.recv(20))
        if "refused" in answer:
            raise LinkError(f"refused: {answer['refused']}")
        with self._lock:
            anew = not answer["resumes"]
            if anew:
                self._wire = Wire()
                self._ask_for_everything()
            self._controller = answer["controller"]
            self._wire.connect(lambda frame: connection.send(json.dumps(frame)), answer["received"])
        if anew:
            self._tell_dirty()
            self._tell_memory(anew=True)
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
                self._wire.beat()
                owes = False
                continue
            now = time.monotonic()
            if text is not None:
                heard_s = now
                order = self._wire.take(json.loads(text))
                self._forks.order({"do": "seen"})
                if order is not None:
                    self._obey(order)
                    owes = True
            elif now - heard_s > lease_s:
                raise TimeoutError(f"the controller has been silent for {lease_s:.0f} s")
            if text is None or now - beaten_s > beat_s:
                self._look_again()
                self._tell_memory()
                self._wire.beat()
                beaten_s = now
            if self._forks_ended:
                self._restart_forks()

    def _obey(self, order: Message) -> None:
        """Carry out an order; acknowledged soon, so that the controller does not give it to a successor again."""
        match order.get("do"):
            case "fork":
                self._fork(order)
            case "send" | "kill":
                self._end_refused(order)
                self._forks.order(order)
            case "ping":
                self._roll.call(order["processes"])
                for process in order["processes"]:
                    self._forks.order({"do": "send", "process": process, "message": {"do": "ping"}})
            case "shutdown":
                self._forks.order(order)
            case "logs" | "read-log":
                self._show_logs(order)

    def _fork(self, order: Message) -> None:
        process = order["process"]
        if (why := self._rules.refusal(order)) is not None:
            self._refuse(process, f"{self.node.name} {why}")
            return
        self._forks.order(self._rules.completed(order) | {"log": str(path_of(self._logs, process))})

    def _refuse(self, process: str, error: str) -> None:
        """In the place of a process that is not started: it says why, and is there until it is told to go, so that the
        reason comes before the end."""
        self._note(f"refused {process}: {error}")
        self._refused.add(process)
        generation = process.split(".")[1] if process.count(".") else ""
        number = int(generation) if generation.isdecimal() else 0
        for say in ("failed", "no-start"):
            message = {"say": say, "generation": number, "error": error, "code": NOT_STARTED}
            self._wire.put({"event": "message", "process": process, "message": message})

    def _end_refused(self, order: Message) -> None:
        process = order["process"]
        if process in self._refused and (order["do"] == "kill" or order["message"]["do"] == "exit"):
            self._refused.discard(process)
            self._wire.put({"event": "exit", "process": process, "code": NOT_STARTED})

    def _show_logs(self, order: Message) -> None:
        """Which logs a job has here, or a piece of one, as base64: a log may hold anything."""
        answer: Message = {"event": "logs", "request": order["request"]}
        if order["do"] == "logs":
            found = logs_in(self._logs, f"{order['job_id']}.")
            logs = [[log.process, log.first, log.end] for log in found[-MOST_LOGS:]]
            self._wire.put(answer | {"logs": logs})
        else:
            data, after = read(self._logs, order["process"], order["at"], min(order["limit"], MOST_LOG_BYTES))
            self._wire.put(answer | {"data": base64.b64encode(data).decode("ascii"), "next": after})

    # -- processes ----------------------------------------------------------------------------------------------------

    def _ask_for_everything(self) -> None:
        """What the fork server says before its answer may already be in it: the answer decides."""
        self._replays += 1
        self._awaited = self._replays
        self._forks.order({"do": "replay", "number": self._replays})

    def _start_forks(self) -> None:
        self._forks_ended = False
        self._forks.start(self._hear, self._note_end)

    def _note_end(self) -> None:
        self._forks_ended = True

    def _restart_forks(self) -> None:
        """The fork server died, and with it all its processes: say so, by the empty list of a new one."""
        self._note("the fork server is gone; starting another")
        self._start_forks()
        with self._lock:
            self._ask_for_everything()

    def _hear(self, event: Message) -> None:
        """Where the end of a process waits for its device, the signs of life of others do not wait behind it."""
        pong = event["event"] == "message" and event["message"].get("say") == "pong"
        if pong and self._awaited is None and self._roll.answered(event["process"]):
            return
        if self._inventory.checks:
            self._news.put(event)
        else:
            self._pass_on(event)

    def _pass_on_news(self) -> None:
        while (event := self._news.get()) is not None:
            self._pass_on(event)

    def _pass_on(self, event: Message) -> None:
        """What happens here, in order. Until the fork server has told everything anew, nothing else is news."""
        match event["event"]:
            case "hello":
                self._pids = {entry["process"]: entry["pid"] for entry in event["processes"]}
            case "forked":
                self._pids[event["process"]] = event["pid"]
            case "exit":
                self._pids.pop(event["process"], None)
                self._await_idle()
        self._tell(event)

    def _tell(self, event: Message) -> None:
        with self._lock:
            if event["event"] == "hello":
                if self._awaited is None or event["asked"] != self._awaited:
                    return
                self._awaited = None
                event = {"event": "hello", "processes": event["processes"]}
            if self._awaited is None:
                self._wire.put(event, _newest_of(event))

    def _await_idle(self) -> None:
        """Before the controller may offer a device again its memory is back, or it is said to be dirty. What has been
        said already is not waited for again."""
        if not self._inventory.checks:
            return
        deadline = time.monotonic() + CLEAN_WAIT_S
        while self._dirty().keys() - self._told_dirty.keys() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._tell_dirty()

    def _dirty(self) -> dict[int, str]:
        return self._inventory.dirty(with_descendants(tuple(self._pids.values())))

    def _look_again(self) -> None:
        """A device that was dirty may have become clean by itself."""
        if self._told_dirty and self._dirty() != self._told_dirty:
            self._tell_dirty()

    def _tell_dirty(self) -> None:
        """On one thread at a time: what was seen last is told last."""
        with self._looking:
            dirty = self._told_dirty = self._dirty()
            said = {str(index): why for index, why in dirty.items()}
            self._wire.put({"event": "devices", "dirty": said}, newest_of="devices")

    def _tell_memory(self, anew: bool = False) -> None:
        """Again once it has changed enough to matter."""
        if self._memory is None:
            return
        found, told = self._memory(), self._told_memory
        least = found.total_bytes / _WORTH_TELLING
        if anew or told is None or abs(found.available_bytes - told.available_bytes) > least:
            self._told_memory = found
            self._wire.put({"event": "memory", **asdict(found)}, newest_of="memory")

    def _note(self, text: str) -> None:
        print(f"suika agent {self.node.name}: {text}", file=sys.stderr, flush=True)


def _newest_of(event: Message) -> Hashable:
    """Of what a process says, the newest of each kind and generation (and rank that it speaks of) counts, as for who
    connects to its fork server later. Each beginning and end of a process is told."""
    if event["event"] != "message":
        return None
    said = event["message"]
    return event["process"], said.get("say"), said.get("generation", 0), said.get("rank")
