"""A node's fork server as its agent sees it: started if there is none, found again if there is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from suika.runtime.messages import Channel, DisconnectedError, Message, connect

START_WAIT_S = 120.0
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME")


class ForksError(RuntimeError):
    """The fork server does not come up."""


class Forks(Protocol):
    """Where an agent's processes are. `on_event` of `start` is called on another thread, `{"event": "hello"}` first."""

    def start(self, on_event: Callable[[Message], None], on_end: Callable[[], None]) -> None: ...

    def order(self, order: Message) -> None:
        """Never raises: if the fork server is gone, `on_end` has been or will be called."""
        ...

    def close(self) -> None:
        """Let go of it; its processes live on."""
        ...


class ForkServerClient:
    """The lasting fork server at `folder/forks.sock`. `environment` is all that its processes get to see."""

    def __init__(
        self,
        folder: Path,
        orphan_limit_s: float,
        preload: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._socket = folder / "forks.sock"
        self._orphan_limit_s = orphan_limit_s
        self._preload = tuple(preload)
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._environment = {**kept, **(environment or {})}
        self._channel: Channel | None = None

    def start(self, on_event: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """Connect to the running server, or start one. Raises `ForksError`."""
        channel = self._channel = self._found() or self._started()

        def read() -> None:
            try:
                while True:
                    on_event(channel.receive())
            except DisconnectedError:
                on_end()

        threading.Thread(target=read, name="forks", daemon=True).start()

    def order(self, order: Message) -> None:
        if self._channel is not None:
            with suppress(DisconnectedError):
                self._channel.send(order)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _found(self) -> Channel | None:
        with suppress(OSError):
            return Channel(connect(self._socket))
        return None

    def _started(self) -> Channel:
        """The server leads its own session: neither a Ctrl-C nor the end of this process reaches it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.unlink(missing_ok=True)
        command = [sys.executable, "-m", "suika.runtime.lasting", "--socket", str(self._socket)]
        command += ["--orphan-limit", str(self._orphan_limit_s)]
        for module in self._preload:
            command += ["--preload", module]
        log = self.folder / "forks.log"
        with log.open("ab") as file:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=self._environment,
                start_new_session=True,
                close_fds=True,
            )
        deadline = time.monotonic() + START_WAIT_S
        while time.monotonic() < deadline:
            if channel := self._found():
                return channel
            if server.poll() is not None:
                tail = log.read_text(errors="replace")[-2000:]
                raise ForksError(f"the fork server ended with {server.returncode}:\n{tail}")
            time.sleep(0.02)
        server.kill()
        raise ForksError(f"the fork server did not come up in {START_WAIT_S:.0f} s")


def end_fork_server(folder: Path, timeout_s: float = 20.0) -> None:
    """End the fork server of `folder`, if there is one, and everything that it forked."""
    try:
        channel = Channel(connect(folder / "forks.sock"))
    except OSError:
        return
    with suppress(DisconnectedError, TimeoutError):
        channel.send({"do": "shutdown"})
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            channel.receive(timeout_s)  # until it closes: then all are gone
    channel.close()
