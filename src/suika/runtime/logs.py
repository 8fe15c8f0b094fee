"""What processes print, in files of bounded size and number that can be followed by position.

A position counts bytes since the process began. The newest part is `NAME.log`; a full one is renamed to
`NAME.log.POSITION`, the position at which it begins, and the oldest are removed. Written by the fork server alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES, MAX_FILES = 8 << 20, 4  # of one process: of a file, and of files
MAX_PROCESSES = 2000  # whose logs a node keeps
_SLASH = "%"  # stands for the slash of a device's name in a file's


@dataclass(frozen=True)
class Log:
    """One process's log: bytes `first` to `end` are there. `at_s`: when it was last written (the node's clock)."""

    process: str
    first: int
    end: int
    at_s: float


def path_of(folder: Path, process: str) -> Path:
    return folder / f"{process.replace('/', _SLASH)}.log"


def logs_in(folder: Path, prefix: str = "") -> list[Log]:
    """Logs of the processes whose name begins with `prefix`, by name."""
    found = []
    for path in sorted(folder.glob("*.log")):
        process = path.name.removesuffix(".log").replace(_SLASH, "/")
        if process.startswith(prefix):
            with suppress(FileNotFoundError):  # being rotated
                status, parts = path.stat(), _parts(path)
                first = parts[0][0] if parts else 0
                found.append(Log(process, first, _start(parts) + status.st_size, status.st_mtime))
    return found


def read(folder: Path, process: str, at: int, limit: int) -> tuple[bytes, int]:
    """At most `limit` bytes from position `at` on, or from the oldest that is left; and the position after them.

    A negative `at` counts from the end.
    """
    path = path_of(folder, process)
    for _ in range(3):  # a file may be renamed while we look
        with suppress(FileNotFoundError):
            parts = [*_parts(path)]
            parts.append((_start(parts), path))
            if at < 0:
                at = max(parts[-1][0] + path.stat().st_size + at, 0)
            at = max(at, parts[0][0])
            first = max(number for number, (start, _) in enumerate(parts) if start <= at)
            data = b""
            for start, holding in parts[first:]:
                if len(data) == limit:
                    break
                with holding.open("rb") as file:
                    file.seek(at + len(data) - start)
                    data += file.read(limit - len(data))
            return data, at + len(data)
    return b"", max(at, 0)


def prune(folder: Path, keep: int = MAX_PROCESSES) -> None:
    """Remove the logs of all but the `keep` processes that wrote last."""
    logs = sorted(logs_in(folder), key=lambda log: log.at_s)
    for log in logs[: max(len(logs) - keep, 0)]:
        path = path_of(folder, log.process)
        for part in (*(part for _, part in _parts(path)), path):
            part.unlink(missing_ok=True)


class RotatingLog:
    """The writing end. A process of the same name as an earlier one goes on in its log."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES) -> None:
        self._path, self._max_bytes, self._max_files = path, max_bytes, max(max_files, 2)
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes) -> None:
        """A full disk loses what is printed, never the process that prints."""
        with suppress(OSError):
            while data:
                if self._size >= self._max_bytes:
                    self._rotate()
                written = os.write(self._fd, data[: self._max_bytes - self._size])
                self._size, data = self._size + written, data[written:]

    def _rotate(self) -> None:
        """The old file is let go of once there is a new one: a number that is closed may soon be another file's."""
        parts = _parts(self._path)
        with suppress(FileNotFoundError):  # somebody has tidied up
            self._path.rename(self._path.with_name(f"{self._path.name}.{_start(parts)}"))
        fresh = self._open()
        os.close(self._fd)
        self._fd, self._size = fresh, 0
        for _, old in parts[: max(len(parts) + 2 - self._max_files, 0)]:
            old.unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._fd)


def _parts(path: Path) -> list[tuple[int, Path]]:
    """(position, file) of the full parts of a log, oldest first."""

    def numbered() -> Iterator[tuple[int, Path]]:
        for part in path.parent.glob(f"{path.name}.*"):
            number = part.name.rpartition(".")[2]
            if number.isdecimal():
                yield int(number), part

    return sorted(numbered())


def _start(parts: list[tuple[int, Path]]) -> int:
    """Where the newest part begins."""
    return parts[-1][0] + parts[-1][1].stat().st_size if parts else 0
