"""A private PostgreSQL server in a temporary folder, reached through a Unix socket."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

MISSING = "PostgreSQL is not installed (no /usr/lib/postgresql/*/bin/initdb): run tests/services/install.sh"


@contextmanager
def server() -> Iterator[str]:
    """The URL of a running server's database `postgres`; the server and its files are gone afterwards."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    assert found, MISSING
    programs = found[-1].parent
    folder = Path(tempfile.mkdtemp(prefix="suika-pg-"))  # short: a socket's address has at most 107 bytes
    user = _unprivileged(folder)
    data = folder / "data"

    def run(*command: object) -> None:
        subprocess.run([str(part) for part in command], user=user, check=True, capture_output=True, timeout=60, cwd="/")

    process = None
    try:
        run(programs / "initdb", "-D", data, "-U", "suika", "--auth=trust", "--no-sync", "-E", "UTF8")
        options = ["-D", data, "-k", folder, "-c", "listen_addresses=", "-c", "fsync=off"]
        with (folder / "log").open("wb") as log:
            command = [str(part) for part in (programs / "postgres", *options)]
            process = subprocess.Popen(command, user=user, stdout=log, stderr=log, cwd="/")
        _await(programs / "pg_isready", folder, process)
        yield f"postgresql://suika@/postgres?host={quote(str(folder))}"
    finally:
        if process is not None:
            process.send_signal(signal.SIGINT)  # "fast": does not wait for clients
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged(folder: Path) -> int:
    """PostgreSQL refuses to run as root: then the folder belongs to somebody else."""
    if os.getuid() != 0:
        return os.getuid()
    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        os.chown(folder, account.pw_uid, account.pw_gid)
        return account.pw_uid
    raise AssertionError("root, and neither user postgres nor nobody exists")


def _await(ready: Path, folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 30
    while subprocess.run([ready, "-h", folder, "-q"], check=False, timeout=10).returncode != 0:
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, "PostgreSQL did not come up"
        time.sleep(0.1)
