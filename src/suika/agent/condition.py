"""What a node says of itself: which of its devices are not clean, and how much memory it has."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict

from suika.agent.inventory import Inventory, with_descendants
from suika.agent.link import Message
from suika.agent.outbox import Outbox
from suika.runtime.rooms import NodeMemory

CLEAN_WAIT_S = 10.0  # how long a device may take to become idle after its process ended
_WORTH_TELLING = 64  # a change of so small a part of the memory


class Condition:
    """`memory`: what the node has of it now; None: it does not say."""

    def __init__(self, inventory: Inventory, memory: Callable[[], NodeMemory] | None, outbox: Outbox) -> None:
        self._inventory = inventory
        self._memory = memory
        self._outbox = outbox
        self._pids: dict[str, int] = {}  # of the live processes
        self._looking = threading.Lock()  # at the devices
        self._told_dirty: dict[int, str] = {}
        self._told_memory: NodeMemory | None = None

    def tell(self) -> None:
        """All of it, to a controller that knows nothing of this node."""
        self.tell_dirty()
        self._tell_memory(anew=True)

    def look_again(self) -> None:
        """A device that was dirty may have become clean by itself; memory is told once it has changed enough."""
        if self._told_dirty and self._dirty() != self._told_dirty:
            self.tell_dirty()
        self._tell_memory()

    def follow(self, event: Message) -> None:
        """Which processes use devices by right. The end of one takes as long as its device needs to become idle."""
        match event["event"]:
            case "hello":
                self._pids = {entry["process"]: entry["pid"] for entry in event["processes"]}
            case "forked":
                self._pids[event["process"]] = event["pid"]
            case "exit":
                self._pids.pop(event["process"], None)
                self._await_idle()

    def tell_dirty(self) -> None:
        """On one thread at a time: what was seen last is told last."""
        with self._looking:
            dirty = self._told_dirty = self._dirty()
            said = {str(index): why for index, why in dirty.items()}
            self._outbox.put({"event": "devices", "dirty": said}, newest_of="devices")

    def _await_idle(self) -> None:
        """Before the controller may offer a device again its memory is back, or it is said to be dirty. What has been
        said already is not waited for again."""
        if not self._inventory.checks:
            return
        deadline = time.monotonic() + CLEAN_WAIT_S
        while self._dirty().keys() - self._told_dirty.keys() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.tell_dirty()

    def _dirty(self) -> dict[int, str]:
        return self._inventory.dirty(with_descendants(tuple(self._pids.values())))

    def _tell_memory(self, anew: bool = False) -> None:
        if self._memory is None:
            return
        found, told = self._memory(), self._told_memory
        least = found.total_bytes / _WORTH_TELLING
        if anew or told is None or abs(found.available_bytes - told.available_bytes) > least:
            self._told_memory = found
            self._outbox.put({"event": "memory", **asdict(found)}, newest_of="memory")
