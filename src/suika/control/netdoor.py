"""The network door: an ASGI app on a TCP port, with TLS by files, in a thread of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import uvicorn
import uvloop
from starlette.types import ASGIApp

from suika.core.errors import require

_START_WAIT_S = 20.0
_PING_S = 120.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class NetDoor:
    """Serves `app` at `host:port` (0: a free one; `url` tells) until `close`. Raises `SpecError` if it cannot."""

    def __init__(self, app: ASGIApp, host: str, port: int, cert: Path | None = None, key: Path | None = None) -> None:
        require((cert is None) == (key is None), "tls", [str(cert), str(key)], "needs both a certificate and a key")
        for path in (cert, key):
            require(path is None or path.is_file(), "tls", str(path), "is not a file")
        # Tokens travel in every request.
        require(cert is not None or host in _LOOPBACK, "host", host, "is open to the network", "give --cert and --key")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            self._socket.listen(1024)  # from now on a client waits, rather than being turned away
        except OSError as error:
            self._socket.close()
            require(False, "port", port, f"cannot be bound at {host}: {error}", "0 takes a free one")
        shown = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if cert else 'http'}://{shown}:{self._socket.getsockname()[1]}"
        settings = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            http="h11",  # which takes 64 KiB of headers at most, before any token was seen; httptools takes all
            timeout_graceful_shutdown=2,
            timeout_keep_alive=30,
            limit_concurrency=5000,
            ws_max_size=4 << 20,
            ws_ping_interval=_PING_S,  # agents' signs of life are our own: these find ends that are gone for good
            ws_ping_timeout=_PING_S,
            ssl_certfile=str(cert) if cert else None,
            ssl_keyfile=str(key) if key else None,
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._serve, name="network-door", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._server.serve(sockets=[self._socket]))

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(_START_WAIT_S)
        self._socket.close()
