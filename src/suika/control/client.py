"""Talks to a running controller from another process. Light: no torch, no pydantic."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from suika.core.errors import SpecError
from suika.runtime.messages import connect


def home() -> Path:
    """Where Suika keeps its state: `$SUIKA_HOME`, by default `~/.suika`."""
    return Path(os.environ.get("SUIKA_HOME") or Path.home() / ".suika").absolute()


def socket_path() -> Path:
    return home() / "controller.sock"


class NoControllerError(RuntimeError):
    """No controller answers at the socket."""


class ControllerFaultError(RuntimeError):
    """The controller failed at a call that was in order; its log says more."""


def call(name: str, path: Path | None = None, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """The result of one call. Raises `SpecError` for a user's mistake, `NoControllerError` if nobody answers."""
    where = path or socket_path()
    request = json.dumps({"call": name, "with": arguments}).encode() + b"\n"
    try:
        with connect(where) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(request)
            with connection.makefile("rb") as lines:
                line = lines.readline()
    except OSError as error:
        reason = error.strerror or str(error)
        raise NoControllerError(f"no cluster answers at {where} ({reason}); `suika up` starts one") from None
    if not line:
        raise NoControllerError(f"the controller at {where} closed the connection")
    reply = json.loads(line)
    if "error" in reply:
        raise SpecError(**reply["error"])
    if "fault" in reply:
        raise ControllerFaultError(reply["fault"])
    return reply["ok"]
