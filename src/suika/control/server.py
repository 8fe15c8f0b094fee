"""The controller's door on this machine: JSON lines over a Unix socket that only its user can open.

A request is one line, `{"call": name, "with": {..}}`; the answer is one line, `{"ok": result}` or
`{"error": {field, value, problem, fix}}` for a user's mistake. One connection may carry many requests.
"""

from __future__ import annotations

import inspect
import json
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from suika.core.errors import SpecError
from suika.runtime.messages import listen

MAX_REQUEST_BYTES = 1 << 20
Calls = Mapping[str, Callable[..., Any]]


class SocketServer:
    """Answers `calls` until `close`. Each connection has a thread; calls must be safe from any thread."""

    def __init__(self, path: Path, calls: Calls) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.path = path
        self._server = _Server(str(path), _Handler, bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listen(path)
        self._server.calls = calls
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
        self.path.unlink(missing_ok=True)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    calls: Calls


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = 600  # a silent client holds its thread no longer than this

    def handle(self) -> None:
        try:
            while line := self.rfile.readline(MAX_REQUEST_BYTES + 1):
                self.wfile.write(answer(self.server.calls, line))
        except OSError:
            return  # the client went away or fell silent


def answer(calls: Calls, line: bytes) -> bytes:
    """The answer to one request line. Never raises: a bad request is an answer too."""
    try:
        reply: dict[str, Any] = {"ok": _perform(calls, line)}
    except SpecError as error:
        shown = error.value if isinstance(error.value, (str, int, float, bool, type(None))) else repr(error.value)
        reply = {"error": {"field": error.field, "value": shown, "problem": error.problem, "fix": error.fix}}
    except Exception as error:  # the boundary: a fault of ours must not take the connection down
        reply = {"fault": f"{type(error).__name__}: {error}"}
    return json.dumps(reply).encode() + b"\n"


def _perform(calls: Calls, line: bytes) -> Any:
    if len(line) > MAX_REQUEST_BYTES:
        raise SpecError("request", f"{len(line)} bytes", f"is longer than {MAX_REQUEST_BYTES} bytes")
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        raise SpecError("request", line[:80].decode(errors="replace"), "is not JSON") from None
    if not isinstance(request, dict) or set(request) != {"call", "with"} or not isinstance(request["with"], dict):
        raise SpecError("request", str(request)[:80], 'is not {"call": name, "with": {..}}')
    call = calls.get(request["call"]) if isinstance(request["call"], str) else None
    if call is None:
        raise SpecError("call", str(request["call"])[:80], "is unknown", f"known: {', '.join(sorted(calls))}")
    try:
        inspect.signature(call).bind(**request["with"])
    except TypeError as error:
        raise SpecError(request["call"], sorted(request["with"]), str(error)) from None
    return call(**request["with"])
