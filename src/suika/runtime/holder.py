"""A node's holder: the process that keeps copies of a job's state in memory, beyond the death of those who made them.

A rank hands its share of a step over as a memfd: nothing is copied, and from then on the memory is the holder's. It
sums the share up, piece by piece, and sends what lives on no other node to the holder of another one, which checks the
sums. Whoever starts the job again reads pieces from any holder, with their sums. A holder knows nothing of tensors. It
works at low priority: what it takes from training is what nobody else wanted. Whoever cannot say its token, which it
tells its coordinator alone, is not served.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from suika.reshard.transports import memfd
from suika.runtime import frames
from suika.runtime.frames import Header
from suika.runtime.messages import Channel, DisconnectedError, Message
from suika.runtime.store import HOST

_NICE = 10
_IDLE_S = 30.0  # a line on which nothing moves for so long is broken
_SCAVENGER = 0x20  # the traffic class for what may wait (CS1)


class Key(NamedTuple):
    """`copied`: it came from another node's holder."""

    generation: int
    step: int
    rank: int
    copied: bool


@dataclass(frozen=True)
class Held:
    """One share, or its beginning that another node sent. Piece i is `memory[offsets[i] : offsets[i] + sizes[i]]`."""

    memory: torch.Tensor
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sums: tuple[int, ...]
    said: Mapping[str, Any]  # what its owner is told of it

    def piece(self, number: int) -> memoryview:
        start = self.offsets[number]
        return bytes_of(self.memory)[start : start + self.sizes[number]]


def main(channel: Channel, launch: Mapping[str, Any]) -> None:
    """Entry of the process, called in the fork. Says `holding`, and of each share `held` or `unheld`."""
    os.nice(_NICE)
    torch.set_num_threads(1)
    holder = Holder(lambda say, **content: channel.send({"say": say, **content}))
    holder.serve()
    with suppress(DisconnectedError):
        while (order := channel.receive())["do"] != "exit":
            holder.obey(order)


class Holder:
    """Two doors: a Unix socket for the ranks of this node, and TCP for other holders and for those who read."""

    def __init__(self, say: Callable[..., None], host: str | None = None) -> None:
        self._token, self._say = secrets.token_hex(16), say
        self._lock = threading.Lock()
        self._counting = threading.Lock()  # of many threads' words the last one must be the newest
        self._held: dict[Key, Held] = {}
        self._dropped = (0, 0)  # up to this (generation, step) nothing is taken any more
        host = host or os.environ.get("SUIKA_ADDRESS", HOST)
        self._tcp = socket.create_server((host, 0))
        self._near = socket.socket(socket.AF_UNIX)
        name = f"suika-holder-{secrets.token_hex(16)}"
        self._near.bind("\0" + name)
        self._near.listen()
        self.address = {"host": host, "port": self._tcp.getsockname()[1], "line": name, "token": self._token}

    def serve(self) -> None:
        """Open both doors, and say where they are."""
        for listener, answer in ((self._tcp, self._answer), (self._near, self._take_over)):
            threading.Thread(target=_accept, args=(listener, answer), daemon=True).start()
        self._say_how_much()

    def close(self) -> None:
        for listener in (self._tcp, self._near):
            listener.shutdown(socket.SHUT_RDWR)  # wakes who waits for a caller
            listener.close()

    @property
    def num_bytes(self) -> int:
        with self._lock:
            return sum(held.memory.numel() for held in self._held.values())

    def obey(self, order: Message) -> None:
        match order["do"]:
            case "drop":  # everything that is older than this complete set, and sets that were given up
                self._drop(tuple(order["before"]), [tuple(key) for key in order["sets"]])
            case "report":
                with self._lock:
                    known = list(self._held.values())
                for held in known:
                    self._say("held", **held.said)
                self._say_how_much(order.get("request", 0))

    def _drop(self, before: tuple[int, ...], sets: list[tuple[int, ...]]) -> None:
        with self._lock:
            self._dropped = max(self._dropped, (before[0], before[1]))
            gone = [k for k in self._held if k[:2] < before or k[:2] in sets]
            for key in gone:
                del self._held[key]
        if gone:
            self._say_how_much()

    def _say_how_much(self, request: int = 0) -> None:
        """`request`: the number of the report that this ends."""
        with self._counting:
            self._say("holding", generation=0, num_bytes=self.num_bytes, request=request, **self.address)

    # -- a rank of this node hands over -------------------------------------------------------------------------------

    def _take_over(self, line: socket.socket) -> None:
        header, fds = frames.receive(line, with_fd=True)
        self._check(header)
        memory = memfd.attach(fds[0], header["num_bytes"])
        frames.send(line, {"ok": True})
        key = Key(header["generation"], header["step"], header["rank"], copied=False)
        try:
            content = bytes_of(memory)
            sums = [zlib.crc32(content[a : a + n]) for a, n in zip(header["offsets"], header["sizes"], strict=True)]
            self._keep(key, memory, header, sums)
            if header["alone"]:
                self._send_on(key, memory, header, sums)
        except Exception as error:
            self._fail(key, error)

    def _send_on(self, key: Key, memory: torch.Tensor, header: Header, sums: list[int]) -> None:
        """Send the pieces that have no owner on another node to the holder that keeps them a second time."""
        span, peer, num = memfd.span_of(memory), header["next"], header["alone"]
        assert span is not None
        more = {
            "do": "copy",
            "token": peer["token"],
            "num_bytes": header["alone_bytes"],
            "sums": sums[:num],
        }
        cut = {name: header[name][:num] for name in ("offsets", "sizes")}
        with socket.create_connection((peer["host"], peer["port"]), _IDLE_S) as line:
            line.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, _SCAVENGER)
            frames.send(line, header | more | cut)
            frames.send_file(line, span.fd, 0, header["alone_bytes"])
            answer, _ = frames.receive(line)
        if "error" in answer:
            raise RuntimeError(f"the holder at {peer['host']}:{peer['port']} says: {answer['error']}")

    # -- other holders send, and ranks that start read ----------------------------------------------------------------

    def _answer(self, line: socket.socket) -> None:
        while True:
            request, _ = frames.receive(line)
            self._check(request)
            try:
                if request["do"] == "copy":
                    self._receive(line, request)
                else:
                    self._show(line, request)
            except (KeyError, ValueError, MemoryError) as error:
                frames.send(line, {"error": f"{type(error).__name__}: {error}"})
                return

    def _receive(self, line: socket.socket, header: Header) -> None:
        key = Key(header["generation"], header["step"], header["rank"], copied=True)
        memory = room(header["num_bytes"])
        frames.receive_into(line, bytes_of(memory))
        content, sums = bytes_of(memory), header["sums"]
        for offset, size, expected in zip(header["offsets"], header["sizes"], sums, strict=True):
            if zlib.crc32(content[offset : offset + size]) != expected:
                raise ValueError("it arrived changed")
        self._keep(key, memory, header, sums)
        frames.send(line, {"ok": True})

    def _show(self, line: socket.socket, request: Header) -> None:
        """Pieces of a share, one after the other, with their sums."""
        with self._lock:
            held = self._held[Key(request["generation"], request["step"], request["rank"], request["copied"])]
        numbers = request["pieces"]
        frames.send(line, {"sizes": [held.sizes[i] for i in numbers], "sums": [held.sums[i] for i in numbers]})
        for number in numbers:
            line.sendall(held.piece(number))

    # -- keeping ------------------------------------------------------------------------------------------------------

    def _keep(self, key: Key, memory: torch.Tensor, header: Header, sums: list[int]) -> None:
        said = {**key._asdict(), "num_bytes": memory.numel(), **{n: header[n] for n in ("alone", "stall_s", "meta")}}
        held = Held(memory, tuple(header["offsets"]), tuple(header["sizes"]), tuple(sums), said)
        with self._lock:
            if key[:2] <= self._dropped:
                return  # it comes late: a newer set is complete
            self._held[key] = held
        self._say_how_much()  # first: what a set takes is in its owner's book before the set counts
        self._say("held", **said)

    def _fail(self, key: Key, error: Exception) -> None:
        self._say("unheld", error=f"{type(error).__name__}: {error}", **key._asdict())

    def _check(self, header: Header) -> None:
        if not hmac.compare_digest(str(header.get("token", "")), self._token):
            raise PermissionError("does not know this holder's token")


def room(num_bytes: int) -> torch.Tensor:
    """Memory for a copy. It is a luxury: as much again must stay free. Raises `MemoryError`."""
    available = memfd.available_bytes()
    if 2 * num_bytes > available:
        raise MemoryError(f"a copy of {num_bytes} bytes is kept only where twice that is free; {available} bytes are")
    return memfd.empty((num_bytes,), torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers


def _accept(listener: socket.socket, answer: Callable[[socket.socket], None]) -> None:
    """A thread per line: there are as many as ranks and nodes, and each lives as long as one share."""

    def serve(line: socket.socket) -> None:
        with line, suppress(OSError, DisconnectedError, KeyError, TypeError, ValueError):  # its other end will notice
            line.settimeout(_IDLE_S)
            if line.family == socket.AF_INET:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a piece must not wait for an ACK
            answer(line)

    while True:
        try:
            line, _ = listener.accept()
        except OSError:
            return  # closed
        threading.Thread(target=serve, args=(line,), daemon=True).start()
