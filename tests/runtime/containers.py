"""Real containers without a registry: the machine's own programs in a root of their own, in namespaces of their own."""

from __future__ import annotations

import os
import resource
import shutil
import site
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import suika

MISSING = "{} is not installed: run tests/services/install.sh"
RUNTIMES = ("podman", "bubblewrap")
_MERGED = ("bin", "sbin", "lib", "lib64")  # links into /usr


def inside_variables() -> dict[str, str]:
    """Variables that let the container's Python find Suika, its libraries and the tiny program."""
    found = [Path(suika.__file__).parents[1], Path(__file__).parent, *site.getsitepackages()]
    return {"PYTHONPATH": ":".join(map(str, found))}


def container(runtime: str, folder: Path, python: bool = True) -> list[str]:
    """The start of a command line that runs a program in a container, which may write to `folder`. `python`: it finds
    ours there, and Suika."""
    programs = {"podman": ("podman", "runc"), "bubblewrap": ("bwrap",)}[runtime]
    for program in programs:
        assert shutil.which(program), MISSING.format(program)
    if refusal := _refusal():
        pytest.skip(f"THIS MACHINE LETS NOBODY MAKE NAMESPACES OR MOUNTS, {runtime} is not tested: {refusal}")
    ours = [Path(sys.prefix), Path(sys.base_prefix), Path(suika.__file__).parents[2]]
    shown = [folder, *(ours if python else ())]
    if runtime == "podman":
        return _podman(folder, shown)
    apart = ("--unshare-pid", "--unshare-ipc", "--unshare-uts")
    binds = [word for path in shown for word in ("--bind", str(path), str(path))]
    inside = ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", *binds, *apart]
    search = ["--setenv", "PATH", _path()]
    return ["bwrap", *inside, "--die-with-parent", *search]


@cache
def _refusal() -> str:
    """What the kernel says to whoever makes a namespace and mounts something in it; nothing if it may be done."""
    kinds = ["--mount", "--pid", "--fork", "--ipc", "--uts"]
    tried = subprocess.run(["unshare", *kinds, "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True, timeout=60)
    return tried.stderr.decode().strip() if tried.returncode else ""


def _podman(folder: Path, shown: list[Path]) -> list[str]:
    root = folder / "root"
    if not root.exists():
        root.mkdir()
        for name in _MERGED:
            (root / name).symlink_to(f"usr/{name}")
    most = [f"--ulimit={name.lower()}={_limit(name)}" for name in ("NOFILE", "NPROC")]  # more asks for a privilege
    binds = [f"--volume={path}:{path}" for path in shown]
    inside = [
        "--network=host",
        "--volume=/usr:/usr:ro",
        "--volume=/etc:/etc:ro",
        *binds,
        *most,
        f"--env=PATH={_path()}",
    ]
    return ["podman", "--runtime=runc", "run", "--rm", "--preserve-fds=1", *inside, "{env}", "--rootfs", str(root)]


def _limit(name: str) -> str:
    most = min(resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] % (1 << 62), 4096)
    return f"{most}:{most}"


def _path() -> str:
    return os.pathsep.join((f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"))


def records() -> set[str]:
    """Ids of the containers that podman has on record, running or not."""
    found = subprocess.run(
        ["podman", "ps", "--all", "--quiet", "--no-trunc"], check=True, capture_output=True, timeout=60
    )
    return set(found.stdout.decode().split())


def forget(ids: Iterable[str]) -> None:
    for each in ids:
        subprocess.run(["podman", "rm", "--force", each], check=True, capture_output=True, timeout=60)


def namespace(pid: int, kind: str = "pid") -> str:
    return os.readlink(f"/proc/{pid}/ns/{kind}")
