"""The jobs' side of node agents: orders to their processes, and questions, over the connections that agents open.

`AgentHub` is a `runtime.messages.Processes`: a job's coordinator does not know where its processes are.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from suika.agent.link import WITH_COMMANDS, Message
from suika.control.attached import Attached, Listener, Question
from suika.control.sessions import LEASE_S, Sessions, Watcher
from suika.runtime.gang import COMMAND_ENTRY, NOT_STARTED

ASK_WAIT_S = 5.0  # for a node's answer to a question
_ASK_PATIENCE_S, _ASK_AGAIN_S = 1.0, 30.0  # an answer is out so long: nobody else waits; it never came: until then


class UnreachableError(RuntimeError):
    """The node is not connected now, or does not answer."""


class AgentHub(Sessions):
    """Nodes with agents as a job sees them. Safe from any thread."""

    def __init__(self, watcher: Watcher, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(watcher, lease_s, clock)
        self._requests = itertools.count(1)

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: Listener) -> None:
        with self._lock:
            attached = self._nodes.get(node)
            if attached is not None:
                assert process not in attached.listeners, f"{process} runs already"
                attached.listeners[process] = listener
                self._where[process] = node
                if not attached.greeted:
                    attached.ordered.add(process)
                if entry == COMMAND_ENTRY and attached.protocol < WITH_COMMANDS:
                    self._refuse(attached, process, launch["generation"])
                    return
                attached.wire.put({"do": "fork", "process": process, "entry": entry, "launch": dict(launch)})
        if attached is None:
            listener({"event": "exit", "process": process, "code": -9})

    def _refuse(self, attached: Attached, process: str, generation: int) -> None:
        """In the place of an agent that does not know what a command is."""
        listener = attached.listeners.pop(process)
        self._where.pop(process, None)
        attached.ordered.discard(process)
        assert listener is not None
        error = f"the agent of {attached.node.name} is of an older version, which runs no commands: upgrade it"
        said = {"say": "no-start", "generation": generation, "error": error, "code": NOT_STARTED}
        listener({"event": "message", "process": process, "message": said})
        listener({"event": "exit", "process": process, "code": NOT_STARTED})

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        with self._lock:
            attached = self._of(process)
            if attached is None:
                return
            attached.wire.put({"do": "send", "process": process, "message": dict(message)})

    def ping(self, processes: Collection[str]) -> None:
        with self._lock:
            asked: dict[str, list[str]] = {}
            for process in processes:
                if self._of(process) is not None:
                    asked.setdefault(self._where[process], []).append(process)
            for attached, names in [(self._nodes[node], names) for node, names in asked.items()]:
                if attached.connection is not None:
                    attached.put_pings(names)
                    continue
                for name in names:  # a broken connection is no sign of a dead process: the lease decides
                    if (listener := attached.listeners.get(name)) is not None:
                        listener({"event": "unreachable", "process": name})

    def kill(self, process: str) -> None:
        with self._lock:
            attached = self._of(process)
            if attached is not None:
                attached.wire.put({"do": "kill", "process": process})

    def unanswered_s(self, process: str) -> float:
        # Without the lock: a thousand jobs that wonder at once must not hold up the very answers they wait for.
        attached = self._of(process)
        ping = attached.pings.get(process) if attached is not None else None
        taken_s = ping.taken_s if ping is not None else None
        if attached is None or attached.connection is None or taken_s is None:
            return 0.0
        return self._clock() - max(taken_s, attached.joined_s)  # a break held up the answer, too

    def claim(self, process: str, listener: Listener) -> None:
        """From now on `listener` hears of a process that ran before; first of what it has said since."""
        with self._lock:
            attached = self._of(process)
            if attached is None or process not in attached.listeners:
                said: list[Message] = [{"event": "exit", "process": process, "code": -9}]
            else:
                attached.listeners[process] = listener
                said = list(attached.unclaimed.pop(process, ()))
            for event in said:
                listener(event)

    def ask(self, node: str, order: Message, timeout_s: float = ASK_WAIT_S) -> Message:
        """The node's answer to a question about its logs. Blocks, but not for a node that is known to hang: one
        question finds that out for all. Raises `UnreachableError`."""
        number = next(self._requests)
        with self._lock:
            attached, now = self._nodes.get(node), self._clock()
            if attached is None or attached.connection is None:
                raise UnreachableError(f"{node} is not connected")
            if attached.protocol < WITH_COMMANDS:
                raise UnreachableError(f"the agent of {node} is of an older version, which shows no logs: upgrade it")
            hangs = any(now - question.since_s > _ASK_PATIENCE_S for question in attached.asked.values())
            if hangs or now < attached.mute_until_s:
                raise UnreachableError(f"{node} does not answer at present")
            question = attached.asked[number] = Question(now)
            attached.wire.put(order | {"request": number})
        with suppress(TimeoutError):
            return question.answer.result(timeout_s)
        with self._lock:
            if attached.asked.pop(number, None) is None:
                return question.answer.result()  # it came at the last moment
            attached.mute_until_s = self._clock() + _ASK_AGAIN_S
        raise UnreachableError(f"{node} did not answer for {timeout_s:.0f} s")

    def _of(self, process: str) -> Attached | None:
        return self._nodes.get(self._where.get(process, ""))
