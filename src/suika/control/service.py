"""A whole cluster on this machine: the local backend, the controller, and its door."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from suika.backends.local import LocalBackend
from suika.control.api import Api
from suika.control.controller import Controller
from suika.control.joblogs import FolderShelf
from suika.control.launch import LocalLauncher
from suika.control.memory_store import MemoryStore
from suika.control.pricing import EstimatedPricing
from suika.control.server import SocketServer
from suika.core.cluster import Cluster
from suika.core.errors import SpecError
from suika.runtime.events import JobEvent
from suika.schedule.policies import parse_policy

TRAINER = ("suika.train.program",)


class Service:
    """Everything lives in `folder`; one service at a time has it (a lock that ends with its process).

    Use as a context: leaving it ends every process of every job.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        policy: str = "suika",
        listener: Callable[[JobEvent], object] | None = None,
    ) -> None:
        self.folder = folder
        self.stopped = threading.Event()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = take_lock(folder)
        self.backend = LocalBackend(cluster, folder, preload=TRAINER)
        self.controller = Controller(
            cluster,
            MemoryStore(),
            parse_policy(policy),
            EstimatedPricing(cluster, cores=len(os.sched_getaffinity(0))),
            LocalLauncher(self.backend, folder),
            time.time,
            listener=listener,
        )
        self.controller.state.keep_copies_in(self.backend.rooms)
        self.api = Api(self.controller, FolderShelf(self.backend.logs))
        self._server: SocketServer | None = None

    def __enter__(self) -> Service:
        try:
            self.backend.start()
            self.controller.start()
            calls: Mapping[str, Any] = {**self.api.calls(), "status": self.status, "down": self.down}
            self._server = SocketServer(self.folder / "controller.sock", calls)
            (self.folder / "controller.pid").write_text(f"{os.getpid()}\n")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def status(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "cluster": self.controller.state.cluster.to_dict(), "home": str(self.folder)}

    def down(self) -> dict[str, Any]:
        """Ask for the end; `stopped` tells whoever holds the service to leave it."""
        active = [job.spec.name for job in self.controller.state.active()]
        self.stopped.set()
        return {"pid": os.getpid(), "jobs_ended": active}

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.controller.close()
        self.backend.close()
        (self.folder / "controller.pid").unlink(missing_ok=True)
        os.close(self._lock)


def take_lock(folder: Path) -> int:
    """The folder's lock, as a descriptor. Raises `SpecError` if another process has it."""
    lock = os.open(folder / "controller.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise SpecError("SUIKA_HOME", str(folder), "a cluster is up here", "`suika down`, or another folder") from None
    return lock


def is_up(folder: Path) -> bool:
    """Whether some process holds the folder's lock."""
    try:
        os.close(take_lock(folder))
    except (SpecError, FileNotFoundError):
        return folder.exists()
    return False
