"""The fork server: imports torch once, then forks ranks in tens of milliseconds instead of ten seconds.

`python -m suika.runtime.forkserver --socket PATH [--preload MODULE]...`

It is the hub of its machine: one owner connects to its Unix socket and asks for processes, sends them messages and
hears of their exits. It is single-threaded (asserted before each fork: a lock held by another thread would stay locked
in the child for ever), leads its own session (a Ctrl-C does not reach it) and is a subreaper: orphans of a dead rank
become its children, and a child that it does not know is killed. When its owner goes, so does everything. What a child
prints goes through a pipe into the child's log. Without torch it starts commands (runtime/command.py) only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from suika.runtime import container
from suika.runtime.descendants import adopt_orphans, children, die_with_parent, kill_group
from suika.runtime.gang import NOT_STARTED
from suika.runtime.logs import RotatingLog, prune
from suika.runtime.messages import Channel, DisconnectedError, Message, listen

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before anything imports BLAS: its threads would make forking unsafe

PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "suika.runtime.worker",
    "suika.runtime.store",
    "suika.runtime.command",
)
WITHOUT_TORCH = ("suika.runtime.command",)
OWNER_WAIT_S = 60.0  # a server that nobody connects to ends itself
REAP_WAIT_S = 10.0
_READ_BYTES, _MOST_READS = 1 << 16, 64  # of a log's pipe; what a child printed last is at most a pipe full
_PR_SET_DUMPABLE = 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Forked:
    """A live child. `channel` is the hub's end of its socket pair, `printed` of its pipe; -1: it has closed it."""

    name: str
    pid: int
    channel: Channel
    printed: int
    log: RotatingLog | None
    outage_s: float | None = None  # it must not outlive the contact to its controller by more
    is_keeper: bool = False  # it stands before a container, which it ends in order when it is asked to
    kill_at_s: float | None = None  # then it has had its time for that


class ForkServer:
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
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, end_quietly)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._reap)
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
                    self._end(child)

    def _end(self, child: Forked) -> None:
        """At once, but for a container: its runtime is given a moment to put its own records in order."""
        if not child.is_keeper:
            kill_group(child.pid)
        elif child.kill_at_s is None:
            child.kill_at_s = time.monotonic() + container.END_WAIT_S
            with suppress(ProcessLookupError):
                os.kill(child.pid, container.END)

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
        log = self._log(order)
        try:
            pid, ours, printed = self._begin(order, log)
        except OSError as error:  # no process or file is to be had: that ends this one, not those that run
            print(f"{order['process']} cannot be forked: {error}", file=sys.stderr, flush=True)
            if log is not None:
                log.close()
            self._tell({"event": "exit", "process": order["process"], "code": NOT_STARTED})
            return
        with suppress(OSError):
            os.setpgid(pid, pid)  # the child does it too: whoever comes first, a kill reaches its group
        ours.setblocking(False)
        launch = order["launch"]
        is_keeper = bool(launch.get("environment", {}).get("container"))
        child = Forked(order["process"], pid, Channel(ours), printed, log, launch.get("outage_s"), is_keeper)
        self._by_name[child.name] = self._by_pid[pid] = child
        self._listened.add(child.channel)
        self._selector.register(child.channel, selectors.EVENT_READ, lambda: self._relay(child))
        self._selector.register(printed, selectors.EVENT_READ, lambda: self._keep_log(child, 1))
        self._tell({"event": "forked", "process": child.name, "pid": pid})

    def _begin(self, order: Message, log: RotatingLog | None) -> tuple[int, socket.socket, int]:
        """The child's pid, and our ends of its socket pair and its pipe. Raises `OSError`, and leaves nothing open."""
        ours, theirs = socket.socketpair()
        pipe: tuple[int, ...] = ()
        try:
            printed, prints = pipe = os.pipe()
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            for fd in pipe:
                os.close(fd)
            raise
        if pid == 0:
            ours.close()  # or it would never hear that the server is gone
            os.close(printed)
            self._become(order, theirs, prints, log)
        theirs.close()
        os.close(prints)
        os.set_blocking(printed, False)
        return pid, ours, printed

    def _log(self, order: Message) -> RotatingLog | None:
        if order.get("log") is None:
            return None
        path = Path(order["log"])
        try:
            prune(path.parent)
            return RotatingLog(path, **order.get("log_limits", {}))
        except OSError as error:  # a full disk: what this child prints is lost, and no other child with it
            print(f"no log for {order['process']}: {error}", file=sys.stderr, flush=True)
            return None

    def _keep_log(self, child: Forked, most_reads: int) -> None:
        """Take what the child has printed; each time a little, so that no child's chatter keeps others waiting."""
        if child.printed < 0:
            return
        with suppress(BlockingIOError):
            for _ in range(most_reads):
                data = os.read(child.printed, _READ_BYTES)
                if child.log is not None:
                    child.log.write(data)
                if not data:
                    self._end_log(child)
                    return

    def _end_log(self, child: Forked) -> None:
        if child.printed >= 0:
            self._selector.unregister(child.printed)
            os.close(child.printed)
            child.printed = -1
            if child.log is not None:
                child.log.close()

    def _become(self, order: Message, theirs: socket.socket, prints: int, log: RotatingLog | None) -> NoReturn:
        """In the child: drop everything of the server's, then run the entry. Never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.setpgid(0, 0)
            if user := order.get("user"):
                become_user(user["uid"], user["gid"])
            die_with_parent()
            _redirect(prints)
            os.environ.update(order["launch"].get("variables", {}))
            self._selector.close()
            if log is not None:
                log.close()
            for child in self._by_name.values():
                if child.printed >= 0:  # then its log is open too
                    os.close(child.printed)
                    if child.log is not None:
                        child.log.close()
            for fd in (self._wake_read, self._wake_write, self._listener.fileno()):
                os.close(fd)
            assert self._owner is not None
            for channel in (self._owner, *(child.channel for child in self._by_name.values())):
                channel.close()
            module, _, function = order["entry"].partition(":")
            getattr(importlib.import_module(module), function)(Channel(theirs), order["launch"])
            code = 0
        except SystemExit as request:
            code = request.code if isinstance(request.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

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
            self._end(child)
        while children() and time.monotonic() < deadline:
            self._kill_overdue()
            for pid, _ in _ended():
                self._by_pid.pop(pid, None)
            self._by_pid = {pid: child for pid, child in self._by_pid.items() if pid in children()}
            self._by_name = {child.name: child for child in self._by_pid.values()}
            self._kill_orphans()
            time.sleep(0.01)


def lead_session() -> None:
    """A session of its own, and a subreaper: orphans of dead children become its children."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    adopt_orphans()


def become_user(uid: int, gid: int) -> None:
    """For good, with no other groups. The kernel then takes the process for one with secrets, which it is not: it may
    share memory with its like."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _ended() -> list[tuple[int, int]]:
    """(pid, status) of all children that have ended, collected."""
    found = []
    with suppress(ChildProcessError):
        while (result := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(result)
    return found


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _redirect(prints: int) -> None:
    """stdin from nowhere; stdout and stderr into the log's pipe, line by line."""
    source = os.open(os.devnull, os.O_RDONLY)
    for fd, number in ((source, 0), (prints, 1), (prints, 2)):
        os.dup2(fd, number)
    os.close(source)
    os.close(prints)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # both are files


def end_quietly(*_: Any) -> NoReturn:
    raise SystemExit(0)


def run_at(path: Path, preload: Sequence[str], server_of: Callable[[socket.socket], ForkServer]) -> None:
    """Lead a session, listen at `path`, import everything once and serve; the socket is gone afterwards."""
    lead_session()
    listener = listen(path)
    try:
        for module in (*PRELOAD, *preload) if find_spec("torch") else WITHOUT_TORCH:
            importlib.import_module(module)
        gc.freeze()  # what was imported stays shared: a child's collections neither scan nor copy it
        server_of(listener).run()
    finally:
        listener.close()
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="suika.runtime.forkserver")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--preload", action="append", default=[])
    arguments = parser.parse_args()
    run_at(arguments.socket, arguments.preload, ForkServer)


if __name__ == "__main__":
    main()
