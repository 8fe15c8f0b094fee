"""A job's rendezvous store: a TCPStore in a process of its own, and how a rank joins it.

Never inside the fork server, which must stay single-threaded. The kernel picks the port while binding it (port 0), so
no other process can take it in between; a token says whose store it is, so that nobody joins another job's.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from suika.runtime.messages import Channel, DisconnectedError
from suika.runtime.sockets import SocketWatch

HOST = "127.0.0.1"  # unless the node says, in SUIKA_ADDRESS, where others reach it
TOKEN_KEY = "suika/token"
ENTRY = "suika.runtime.store:serve"
_ATTEMPTS = 5
_ANSWER_S = 10.0
_AGAIN_S = 0.05


class StoreRefusedError(RuntimeError):
    """What listens there is not this job's store."""


def serve(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry of the store's process; `launch` is `{token}`. Says `store` with host and port."""
    host = os.environ.get("SUIKA_ADDRESS", HOST)
    store = _bind(host)
    store.set(TOKEN_KEY, launch["token"])
    channel.send({"say": "store", "host": host, "port": store.port})
    try:
        while (order := channel.receive())["do"] != "exit":
            if order["do"] == "keep":
                _forget_all_but(store, order["prefix"])
            channel.send({"say": "pong", "num_keys": store.num_keys()})
    except DisconnectedError:
        return


def _forget_all_but(store: TCPStore, prefix: str) -> None:
    """Drop the keys of other generations: nobody reads them once their groups stand or were called off."""
    for key in store.list_keys():
        if key != TOKEN_KEY and not key.lstrip("/").startswith(prefix):
            store.delete_key(key)


def _bind(host: str) -> TCPStore:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        except RuntimeError:
            if attempt == _ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def join(host: str, port: int, token: str, timeout_s: float) -> TCPStore:
    """A client of the store at `host:port`, whose waits last `timeout_s`. Raises `StoreRefusedError` unless it holds
    `token`, and soon: what does not answer within a few seconds is no store."""
    answers = min(timeout_s, _ANSWER_S)
    try:
        socket.create_connection((host, port), answers).close()  # a TCPStore would try again and again
        with _broken_after(answers):  # and wait for ever for the first word of a mute listener
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=answers))
            found = store.get(TOKEN_KEY).decode(errors="replace") if store.check([TOKEN_KEY]) else None
    except (OSError, RuntimeError) as error:
        raise StoreRefusedError(f"nothing like a store answers at {host}:{port}: {error}") from None
    if found != token:
        raise StoreRefusedError(f"the store at {host}:{port} belongs to another job")
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


@contextmanager
def _broken_after(limit_s: float) -> Iterator[None]:
    """Connections opened in the block are shut if it takes longer; again and again, since a TCPStore may be just about
    to open the next one."""
    watch, done = SocketWatch(), threading.Event()

    def guard() -> None:
        wait_s = limit_s
        while not done.wait(wait_s):
            watch.break_connections()
            wait_s = _AGAIN_S

    guardian = threading.Thread(target=guard, name="store-guard", daemon=True)
    guardian.start()
    try:
        yield
    finally:
        done.set()
        guardian.join()
