"""`LocalBackend`: this machine as a cluster. One fork server serves all its nodes; devices are emulated on CPU.

The backend starts the fork server, speaks with it over one Unix socket and hands each process's events to its
listener. It brings processes up and down, nothing more. When this process ends, however it ends, the connection ends,
and the fork server ends everything that it forked.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from suika.core.cluster import Cluster
from suika.runtime.logs import path_of
from suika.runtime.messages import Channel, DisconnectedError, Message, connect
from suika.runtime.rooms import FRACTION, NodeMemory, Rooms

Listener = Callable[[Message], None]
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV")
_START_WAIT_S = 90.0
_END_WAIT_S = 15.0


class BackendError(RuntimeError):
    """The machine's side failed: no fork server, or it went away."""


class LocalBackend:
    """Processes for the devices of `cluster`, all on this machine. Implements `runtime.messages.Processes`.

    `folder` holds the socket and the logs. `preload` names modules that the fork server imports once, e.g. the trainer.
    The environment of all processes is an explicit selection: no secrets travel.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.logs = folder / "logs"
        part = FRACTION / len(cluster.nodes)  # they share this machine's memory
        self.rooms = Rooms(lambda: dict.fromkeys((node.name for node in cluster.nodes), NodeMemory.here(part)))
        self._socket = folder / "forkserver.sock"
        self._preload = tuple(preload)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._environment = {**kept, **(environment or {})}
        self._listeners: dict[str, Listener] = {}
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> LocalBackend:
        self.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def server_pid(self) -> int:
        assert self._server is not None, "not started"
        return self._server.pid

    def start(self) -> None:
        """Start the fork server and wait until its imports are done (seconds). Raises `BackendError`."""
        assert self._server is None, "started already"
        self.logs.mkdir(parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "suika.runtime.forkserver", "--socket", str(self._socket)]
        for module in self._preload:
            command += ["--preload", module]
        with (self.logs / "forkserver.log").open("ab") as log:
            self._server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                close_fds=True,
            )
        try:
            self._channel = self._connect()
        except BaseException:
            self.close()
            raise
        self._reader = threading.Thread(target=self._read, name="local-backend", daemon=True)
        self._reader.start()

    def _connect(self) -> Channel:
        deadline = time.monotonic() + _START_WAIT_S
        while True:
            try:
                channel = Channel(connect(self._socket))
                channel.receive(max(0.1, deadline - time.monotonic()))  # its hello: imports are done
                return channel
            except OSError as error:  # not bound yet, or it died while importing
                assert self._server is not None
                if self._server.poll() is not None:
                    tail = (self.logs / "forkserver.log").read_text(errors="replace")[-2000:]
                    raise BackendError(f"the fork server ended with {self._server.returncode}:\n{tail}") from None
                if time.monotonic() > deadline:
                    raise BackendError(f"the fork server did not come up in {_START_WAIT_S:.0f} s: {error}") from None
            time.sleep(0.02)

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Listener) -> None:
        """Fork `process` for `node`; it runs `entry` (`module:function`) with `launch`. Events go to `listener`."""
        assert node in self.cluster.node_of, f"{node} is not a node of this cluster"
        with self._lock:
            if self._channel is None:
                raise BackendError("the fork server is gone")
            assert process not in self._listeners, f"{process} runs already"
            self._listeners[process] = listener
        log = str(path_of(self.logs, process))
        self._order({"do": "fork", "process": process, "entry": entry, "launch": dict(launch), "log": log})

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        self._order({"do": "send", "process": process, "message": dict(message)})

    def kill(self, process: str) -> None:
        self._order({"do": "kill", "process": process})

    def ping(self, processes: Collection[str]) -> None:
        for process in processes:
            self.send(process, {"do": "ping"})

    def unanswered_s(self, process: str) -> float:
        return math.inf  # the way there is as long as a socket

    def _order(self, order: Message) -> None:
        if (channel := self._channel) is not None:
            with suppress(DisconnectedError):  # the reader sees it too, and reports every exit
                channel.send(order)

    def _read(self) -> None:
        """The reader thread: hand out events until the fork server is gone; then all its processes are."""
        assert self._channel is not None
        try:
            while True:
                event = self._channel.receive()
                with self._lock:
                    ended = event["event"] == "exit"
                    name = event["process"]
                    listener = self._listeners.pop(name, None) if ended else self._listeners.get(name)
                if listener is not None:
                    listener(event)
        except DisconnectedError:
            with self._lock:
                self._channel.close()
                self._channel = None
                orphaned, self._listeners = self._listeners, {}
            for process, listener in orphaned.items():
                listener({"event": "exit", "process": process, "code": -9})

    def close(self) -> None:
        """End every process and the fork server; returns when they are gone and their socket is removed."""
        if self._server is None:
            return
        self._order({"do": "shutdown"})
        try:
            self._server.wait(_END_WAIT_S if self._channel is not None else 0.1)
        except subprocess.TimeoutExpired:
            self._server.kill()  # its children follow: the kernel kills them with their parent
            self._server.wait()
        if self._reader is not None:
            self._reader.join(_END_WAIT_S)
        self._socket.unlink(missing_ok=True)
        self._server = None
