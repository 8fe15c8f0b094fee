"""The hub of a machine: one owner asks it for processes, sends them messages and hears of their exits.

It is single-threaded (asserted before each fork: a lock held by another thread would stay locked in the child for ever)
and blocks for nobody: what cannot be written at once waits. Orphans of a dead child become children of its process, a
subreaper, and a child that it does not know is killed. When its owner goes, so does everything.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from suika.runtime.descendants import children, kill_group
from suika.runtime.forked import Forked, fork
from suika.runtime.gang import NOT_STARTED
from suika.runtime.messages import Channel, DisconnectedError, Message

OWNER_WAIT_S = 60.0  # a server that nobody connects to ends itself
REAP_WAIT_S = 10.0
_MOST_READS = 64  # of a log's pipe at a child's end: what it printed last is at most a pipe full


class Hub:
    """One selector loop over: the listening socket, the owner, the children's sockets, and SIGCHLD's wake-up pipe."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._owner: Channel | None = None
        self._by_name: dict[str, Forked] = {}
        self._by_pid: dict[int, Forked] = {}
        self._listened: set[Channel] = set()  # children that may still say something
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> None:
        """Serve one owner until its connection ends; then leave nothing behind."""
        self._heed_signals()
        self._owner = self._accept()
        self._selector.register(self._owner, selectors.EVENT_READ, self._obey)
        try:
            while True:
                self._watch_outgoing()
                for key, _ in self._selector.select(self._kill_overdue()):
                    key.data()
        except DisconnectedError:
            pass
        finally:
            self._kill_everything()

    def _heed_signals(self) -> None:
        """A child's end wakes the selector up."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, _end_quietly)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._reap)

    def _accept(self) -> Channel:
        self._listener.settimeout(OWNER_WAIT_S)
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        owner = Channel(connection)
        owner.post({"event": "hello", "pid": os.getpid(), "threads": _num_threads()})
        return owner

    def _watch_outgoing(self) -> None:
        """Let the selector wake us for writing exactly where bytes wait."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, Channel):
                wants = selectors.EVENT_READ | (selectors.EVENT_WRITE if key.fileobj.has_outgoing else 0)
                if wants != key.events:
                    self._selector.modify(key.fileobj, wants, key.data)

    def _obey(self) -> None:
        """Carry out what the owner asks. Its end raises `DisconnectedError`, which ends `run`."""
        assert self._owner is not None
        self._owner.flush()
        for order in self._owner.arrived():
            if order["do"] == "shutdown":
                raise DisconnectedError("the owner asked for the end")
            self._carry_out(order)

    def _carry_out(self, order: Message) -> None:
        match order["do"]:
            case "fork":
                self._fork(order)
            case "send":
                if child := self._by_name.get(order["process"]):
                    self._to_child(child, order["message"])
            case "kill":
                if child := self._by_name.get(order["process"]):
                    child.end()

    def _kill_overdue(self) -> float | None:
        """Kill keepers that were asked to end and are still there. Seconds until the next one is due, if any."""
        asked = [child for child in self._by_name.values() if child.kill_at_s is not None]
        now = time.monotonic()
        for child in asked:
            if child.kill_at_s is not None and now >= child.kill_at_s:
                kill_group(child.pid)
        return max(min(child.kill_at_s or now for child in asked) - now, 0.05) if asked else None

    def _fork(self, order: Message) -> None:
        assert _num_threads() == 1, f"the fork server has {_num_threads()} threads: forking would be unsafe"
        assert order["process"] not in self._by_name, f"{order['process']} runs already"
        try:
            child = fork(order, self._let_go)
        except OSError as error:  # no process or file is to be had: that ends this one, not those that run
            print(f"{order['process']} cannot be forked: {error}", file=sys.stderr, flush=True)
            self._tell({"event": "exit", "process": order["process"], "code": NOT_STARTED})
            return
        self._by_name[child.name] = self._by_pid[child.pid] = child
        self._listened.add(child.channel)
        self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._relay(child))
        self._selector.register(child.printed, selectors.EVENT_READ, lambda: self._keep_log(child, 1))
        self._tell({"event": "forked", "process": child.name, "pid": child.pid})

    def _let_go(self) -> None:
        """In a child: these files are its server's."""
        self._selector.close()
        for child in self._by_name.values():
            child.close_log()
        for fd in (self._wake_read, self._wake_write, self._listener.fileno()):
            os.close(fd)
        assert self._owner is not None
        for channel in (self._owner, *(child.channel for child in self._by_name.values())):
            channel.close()

    def _keep_log(self, child: Forked, most_reads: int) -> None:
        if child.printed >= 0 and not child.keep_printed(most_reads):
            self._end_log(child)

    def _end_log(self, child: Forked) -> None:
        if child.printed >= 0:
            self._selector.unregister(child.printed)
            child.close_log()

    def _relay(self, child: Forked) -> None:
        """Pass on what a child says; its exit is reported when it has been reaped."""
        if child.channel not in self._listened:
            return  # reaped in the same round
        try:
            child.channel.flush()
            for message in child.channel.arrived():
                self._tell({"event": "message", "process": child.name, "message": message})
        except DisconnectedError:
            self._listened.discard(child.channel)
            self._selector.unregister(child.channel)

    def _to_child(self, child: Forked, message: Message) -> None:
        with suppress(DisconnectedError):  # its exit is on the way
            child.channel.post(message)

    def _tell(self, event: Message) -> None:
        assert self._owner is not None
        self._owner.post(event)

    def _reap(self) -> None:
        """Collect ended children at once; first pass on what they said, and end what they left behind."""
        with suppress(BlockingIOError):
            os.read(self._wake_read, 4096)
        for pid, status in _ended():
            child = self._by_pid.pop(pid, None)
            if child is None:
                continue
            kill_group(pid)
            del self._by_name[child.name]
            self._relay(child)
            self._keep_log(child, _MOST_READS)
            self._end_log(child)
            if child.channel in self._listened:
                self._listened.discard(child.channel)
                self._selector.unregister(child.channel)
            child.channel.close()
            self._tell({"event": "exit", "process": child.name, "code": os.waitstatus_to_exitcode(status)})
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Grandchildren whose parent died are ours now (subreaper); nobody else will end them."""
        for pid in children():
            if pid not in self._by_pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _kill_everything(self) -> None:
        deadline = time.monotonic() + REAP_WAIT_S
        for child in self._by_pid.values():
            child.end()
        while children() and time.monotonic() < deadline:
            self._kill_overdue()
            for pid, _ in _ended():
                self._by_pid.pop(pid, None)
            self._by_pid = {pid: child for pid, child in self._by_pid.items() if pid in children()}
            self._by_name = {child.name: child for child in self._by_pid.values()}
            self._kill_orphans()
            time.sleep(0.01)


def _ended() -> list[tuple[int, int]]:
    """(pid, status) of all children that have ended, collected."""
    found = []
    with suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(result)
    return found


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _end_quietly(*_: Any) -> NoReturn:
    raise SystemExit(0)
