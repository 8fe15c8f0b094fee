"""A fork server that outlives its owner, for nodes whose agent may be restarted or lose its controller.

`python -m suika.runtime.lasting --socket PATH --orphan-limit SECONDS [--preload MODULE]...`

It differs from its base in what an owner's end means: the processes train on, and the next owner that connects (the
newest one counts) is told everything it needs: who runs, the newest message of each kind of each process, and how
those ended that it may not have heard of. Only when no owner has said `seen` (a controller is alive and in touch) for
the orphan limit does it end everything.
"""

from __future__ import annotations

import argparse
import os
import selectors
import socket
import time
from collections import deque
from pathlib import Path

from suika.runtime.forkserver import run_at
from suika.runtime.hub import Hub
from suika.runtime.messages import Channel, DisconnectedError, Message

KEPT_EXITS = 1000
TICK_S = 1.0


class OrphanedError(Exception):
    """Nobody has been in touch for the orphan limit, or the owner wants the end."""


class LastingHub(Hub):
    """Also takes `{"do": "seen"}` and `{"do": "replay", "number": ..}` from its owner."""

    def __init__(self, listener: socket.socket, orphan_limit_s: float) -> None:
        super().__init__(listener)
        self._orphan_limit_s = orphan_limit_s
        self._seen_s = time.monotonic()
        self._said: dict[str, dict[tuple[str, int], Message]] = {}  # by process, oldest first
        self._exits: deque[tuple[str, int]] = deque(maxlen=KEPT_EXITS)

    def run(self) -> None:
        """Serve one owner after the other until the limit; then leave nothing behind."""
        self._heed_signals()
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._welcome)
        try:
            while True:
                self._watch_outgoing()
                for key, _ in self._selector.select(min(TICK_S, self._kill_overdue() or TICK_S)):
                    key.data()
                alone_s = time.monotonic() - self._seen_s
                if alone_s > self._orphan_limit_s:
                    raise OrphanedError
                for child in self._by_name.values():
                    if child.outage_s is not None and alone_s > child.outage_s:
                        child.end()  # its successor may begin elsewhere now
        except OrphanedError:
            pass
        finally:
            self._kill_everything()

    def _welcome(self) -> None:
        """A new owner; an earlier one is gone, or hangs."""
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        self._dismiss()
        self._owner = Channel(connection)
        self._selector.register(self._owner, selectors.EVENT_READ, self._obey)
        self._replay()

    def _dismiss(self) -> None:
        if self._owner is not None:
            self._selector.unregister(self._owner)
            self._owner.close()
            self._owner = None

    def _replay(self, asked: int | None = None) -> None:
        """All that an owner must know of what happened before: first who is there, then what they said last.

        `asked` is the number under which the owner asked for it, if it did."""
        processes = [{"process": child.name, "pid": child.pid} for child in self._by_name.values()]
        self._post(
            {"event": "hello", "pid": os.getpid(), "processes": processes, "exits": list(self._exits), "asked": asked}
        )
        for name, said in self._said.items():
            for message in said.values():
                self._post({"event": "message", "process": name, "message": message})

    def _obey(self) -> None:
        owner = self._owner
        if owner is None:
            return  # dismissed in the same round
        try:
            owner.flush()
            for order in owner.arrived():
                match order["do"]:
                    case "seen":
                        self._seen_s = time.monotonic()
                    case "replay":
                        self._replay(order["number"])
                    case "shutdown":
                        raise OrphanedError
                    case "fork" if order["process"] in self._by_name:
                        pass  # asked for twice: by an owner that did not hear that it was done
                    case _:
                        self._carry_out(order)
        except DisconnectedError:
            self._dismiss()

    def _tell(self, event: Message) -> None:
        name = event["process"]
        match event["event"]:
            case "message":
                message = event["message"]
                key = (message["say"], message.get("generation", 0))
                said = self._said.setdefault(name, {})
                said.pop(key, None)  # the order is that of the newest
                said[key] = message
                _forget_old(said, key[1])
            case "exit":
                self._said.pop(name, None)
                self._exits.append((name, event["code"]))
        self._post(event)

    def _post(self, event: Message) -> None:
        if self._owner is not None:
            try:
                self._owner.post(event)
            except DisconnectedError:
                self._dismiss()


def _forget_old(said: dict[tuple[str, int], Message], newest: int) -> None:
    """Generations before the last two say nothing that still matters; 0 is not one."""
    for key in [key for key in said if 0 < key[1] < newest - 1]:
        del said[key]


def main() -> None:
    parser = argparse.ArgumentParser(prog="suika.runtime.lasting")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--orphan-limit", type=float, required=True)
    parser.add_argument("--preload", action="append", default=[])
    arguments = parser.parse_args()
    run_at(arguments.socket, arguments.preload, lambda listener: LastingHub(listener, arguments.orphan_limit))


if __name__ == "__main__":
    main()
