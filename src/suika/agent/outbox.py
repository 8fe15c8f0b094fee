"""What this node tells its controller, over connections that break.

A controller that knows nothing of this node is told first which processes there are. Until the fork server has said
that, in answer to the newest question, nothing else that happens to processes is news: it may be in the answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

from suika.agent.link import Frame, Message, Wire


class Outbox:
    """`replay` has the fork server tell everything anew, under a number. Safe from any thread."""

    def __init__(self, replay: Callable[[int], None]) -> None:
        self._replay = replay
        self._lock = threading.Lock()  # of the three that follow
        self._wire = Wire()
        self._replays = 0  # how often the fork server was asked to tell everything anew
        self._awaited: int | None = 0  # the replay that is still to come: until then nothing else is news

    # -- the connection ----------------------------------------------------------------------------------------------

    @property
    def received(self) -> int:
        return self._wire.received

    def connect(self, send: Callable[[Frame], None], peer_received: int, *, resumes: bool) -> None:
        """Go on where this controller and this agent were, or begin anew."""
        with self._lock:
            if not resumes:
                self._wire = Wire()
                self._ask_for_everything()
            self._wire.connect(send, peer_received)

    def disconnect(self) -> None:
        self._wire.disconnect()

    def take(self, frame: Any) -> Message | None:
        return self._wire.take(frame)

    def beat(self) -> None:
        self._wire.beat()

    # -- what is told ------------------------------------------------------------------------------------------------

    def put(self, message: Message, newest_of: Hashable = None) -> None:
        """What is said of the node, and answers: see `Wire.put`."""
        self._wire.put(message, newest_of)

    def tell(self, event: Message) -> None:
        """What happens to processes, as the fork server says it."""
        with self._lock:
            if event["event"] == "hello":
                if self._awaited is None or event["asked"] != self._awaited:
                    return
                self._awaited = None
                event = {"event": "hello", "processes": event["processes"]}
            if self._awaited is None:
                self._wire.put(event, newest_of(event))

    @property
    def is_awaiting(self) -> bool:
        """Whether the fork server has yet to say which processes there are."""
        return self._awaited is not None

    def ask_for_everything(self) -> None:
        """There is another fork server: what it says first ends all that the controller knew of."""
        with self._lock:
            self._ask_for_everything()

    def _ask_for_everything(self) -> None:
        self._replays += 1
        self._awaited = self._replays
        self._replay(self._replays)


def newest_of(event: Message) -> Hashable:
    """Of what a process says, the newest of each kind and generation (and rank that it speaks of) counts, as for who
    connects to its fork server later. Each beginning and end of a process is told."""
    if event["event"] != "message":
        return None
    said = event["message"]
    return event["process"], said.get("say"), said.get("generation", 0), said.get("rank")
