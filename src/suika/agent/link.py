"""Numbered, acknowledged messages between an agent and its controller, over connections that may break.

Each side of a session has a `Wire`. A frame is `{"n": number, "ack": highest number taken, "m": message}`, or
`{"ack": ..}` alone as a sign of life. After a break both sides send again what was not acknowledged; what arrives twice
is dropped, so that each message is taken exactly once and in order.

A message that waits to be sent, because there is no connection or because the other side is slow, may be overtaken by
a newer one of which only the newest counts: a controller that is away for an hour costs a node no memory, and a slow
one is told less instead of later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

Message = dict[str, Any]
Frame = dict[str, Any]
# Raised when frames or messages change. A controller serves agents down to OLDEST and asks each only what it knows, so
# a cluster is upgraded controller first; an agent that is ahead of its controller is refused until that has followed.
PROTOCOL, OLDEST = 4, 1
WITH_COMMANDS = 2  # since this one: commands, logs
WITH_ROLL_CALL = 3  # since this one: many processes are asked for a sign of life at once
# Since 4 nodes say how much memory they have.
WINDOW = 256  # messages on their way: more wait until some of them have been acknowledged


class LinkError(ValueError):
    """The other side does not keep to the protocol: the connection is of no use."""


class Wire:
    """One side's end. `put` may be called from any thread; frames leave in the order of their numbers."""

    def __init__(self) -> None:
        self.received = 0  # highest number taken
        self._lock = threading.RLock()
        self._last = 0  # highest number given
        self._sent: deque[tuple[int, Message]] = deque()  # once, and not acknowledged yet
        self._waiting: dict[Hashable, Message] = {}  # never sent, without a number; oldest first
        self._send: Callable[[Frame], None] | None = None
        self._going_on = False

    def connect(self, send: Callable[[Frame], None], peer_received: int) -> None:
        """A connection stands (again): what the other side has not taken goes out first."""
        with self._lock:
            self._drop(peer_received)
            self._send = send
            for number, message in tuple(self._sent):
                self._try(number, message)
            self._go_on()

    def disconnect(self) -> None:
        with self._lock:
            self._send = None

    def put(self, message: Message, newest_of: Hashable = None) -> None:
        """Send now, or as soon as can be. Of messages with the same `newest_of` that still wait the newest is sent, in
        the place of the newest; None: each is."""
        with self._lock:
            key = object() if newest_of is None else newest_of
            self._waiting.pop(key, None)
            self._waiting[key] = message
            self._go_on()

    def beat(self) -> None:
        """A sign of life, which also acknowledges."""
        with self._lock:
            if self._send is not None:
                self._attempt({"ack": self.received})

    def take(self, frame: Any) -> Message | None:
        """The frame's message; None for a sign of life and for what was taken before. Raises `LinkError`."""
        if not isinstance(frame, dict) or not _count(frame.get("ack")):
            raise LinkError("a frame needs 'ack', a whole number")
        with self._lock:
            if frame["ack"] > self._last:
                raise LinkError(f"acknowledges {frame['ack']}, which was never sent")
            number = frame.get("n")
            if number is not None and not _count(number):
                raise LinkError("'n' must be a whole number")
            if number is not None and number > self.received + 1:
                raise LinkError(f"message {number} after {self.received}: some are missing")
            if number is not None and not isinstance(frame.get("m"), dict):
                raise LinkError("'m' must be a message")
            self._drop(frame["ack"])
            self._go_on()
            if number is None or number <= self.received:
                return None
            self.received = number
            message = frame["m"]
            assert isinstance(message, dict)
            return message

    def holds(self, message: Message) -> bool:
        """Whether the other side may not have taken this very message."""
        with self._lock:
            return any(m is message for _, m in self._sent) or any(m is message for m in self._waiting.values())

    def unacknowledged(self) -> list[Message]:
        """What the other side may not have taken."""
        with self._lock:
            return [*(message for _, message in self._sent), *self._waiting.values()]

    def _drop(self, acknowledged: int) -> None:
        while self._sent and self._sent[0][0] <= acknowledged:
            self._sent.popleft()

    def _go_on(self) -> None:
        """Send what waits, as far as the window allows. An acknowledgement that a send brings in does not begin
        another round inside this one: that would send in another order than it numbers."""
        if self._going_on:
            return
        self._going_on = True
        while self._send is not None and self._waiting and len(self._sent) < WINDOW:
            message = self._waiting.pop(next(iter(self._waiting)))
            self._last += 1
            self._sent.append((self._last, message))
            self._try(self._last, message)
        self._going_on = False

    def _try(self, number: int, message: Message) -> None:
        self._attempt({"n": number, "ack": self.received, "m": message})

    def _attempt(self, frame: Frame) -> None:
        if self._send is not None:
            try:
                self._send(frame)
            except Exception:  # whatever it is, this connection is over; the message waits for the next
                self._send = None


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
