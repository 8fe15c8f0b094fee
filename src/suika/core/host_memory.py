"""What this host has of memory and can still give: the kernel's word, or that of a control group if it allows less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT = 1 << 60  # what version 1 says when there is none is just below 2^63


@dataclass(frozen=True)
class HostMemory:
    total_bytes: int
    available_bytes: int  # without swapping, page cache that can be dropped included


def host_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """As it is now. Of all control groups that this process is in (versions 1 and 2) the tightest counts."""
    said = _fields(proc / "meminfo")
    total, available = said["MemTotal:"] * 1024, said["MemAvailable:"] * 1024
    for folder, names in _groups(proc, groups):
        with suppress(OSError, ValueError):
            limit = (folder / names.limit).read_text().strip()
            if limit == "max" or int(limit) >= _NO_LIMIT:
                continue
            cache = _fields(folder / "memory.stat").get(names.cache, 0)
            used = int((folder / names.usage).read_text()) - cache
            total, available = min(total, int(limit)), min(available, max(int(limit) - used, 0))
    return HostMemory(total, available)


@dataclass(frozen=True)
class _Names:
    limit: str
    usage: str
    cache: str  # in memory.stat: file pages that nobody has used lately


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def _groups(proc: Path, groups: Path) -> Iterator[tuple[Path, _Names]]:
    """This process's groups and all above them. Inside a container their paths may be those of its host: then the
    folders are not there, and what is mounted at the top is the container's own group."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top, names = (groups / "memory", _V1) if controllers else (groups, _V2)
            below = Path(path.lstrip("/"))
            yield from ((top / part, names) for part in (below, *below.parents))


def _fields(path: Path) -> dict[str, int]:
    """A file of lines `name number ..`."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
