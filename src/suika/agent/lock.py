"""One agent per folder: a lock that ends with its process, and says whose it is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def take(folder: Path) -> int | None:
    """The folder's lock as a descriptor to keep; None if another process has it."""
    lock = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def holder(folder: Path) -> int | None:
    """The process that serves from `folder`; None if there is none."""
    path = folder / "agent.lock"
    if not path.exists():
        return None
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        text = os.pread(lock, 32, 0).strip()
        return int(text) if text else None
    else:
        return None
    finally:
        os.close(lock)
