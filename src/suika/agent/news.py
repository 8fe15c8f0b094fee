"""What happens to this node's processes, on its way to the controller: in order, but for signs of life.

The end of a process is told once its device is clean, which may take a while, and what happens after it waits behind
it. Signs of life do not: who is asked for one has little time.
"""

from __future__ import annotations

import queue

from suika.agent.condition import Condition
from suika.agent.link import Message
from suika.agent.outbox import Outbox
from suika.agent.roll import RollCall


class News:
    """`waits`: whether devices are waited for; then `run` on a thread of its own passes on what `hear` is told."""

    def __init__(self, waits: bool, condition: Condition, outbox: Outbox) -> None:
        self.waits = waits
        self.roll = RollCall(lambda here: outbox.tell({"event": "alive", "processes": here}))
        self._condition = condition
        self._outbox = outbox
        self._heard: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the end

    def hear(self, event: Message) -> None:
        pong = event["event"] == "message" and event["message"].get("say") == "pong"
        if pong and not self._outbox.is_awaiting and self.roll.answered(event["process"]):
            return
        if self.waits:
            self._heard.put(event)
        else:
            self._pass_on(event)

    def run(self) -> None:
        """Until `end`."""
        while (event := self._heard.get()) is not None:
            self._pass_on(event)

    def end(self) -> None:
        self._heard.put(None)

    def _pass_on(self, event: Message) -> None:
        self._condition.follow(event)
        self._outbox.tell(event)
