"""What the controller orders a node to do: the fork server does most of it, if the node's rules allow it."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from suika.agent.forks import Forks
from suika.agent.link import Message
from suika.agent.outbox import Outbox
from suika.agent.roll import RollCall
from suika.agent.rules import Rules
from suika.agent.words import MOST_LOG_BYTES, MOST_LOGS
from suika.runtime.gang import NOT_STARTED
from suika.runtime.logs import logs_in, path_of, read


@dataclass
class Orders:
    """`rules`: what is started; nothing else is, whatever the controller says. `note`: for the operator's eyes."""

    node: str
    logs: Path
    rules: Rules
    forks: Forks
    roll: RollCall
    outbox: Outbox
    note: Callable[[str], None]
    _refused: set[str] = field(default_factory=set)  # processes that were not started, until they are told to go

    def carry_out(self, order: Message) -> None:
        match order.get("do"):
            case "fork":
                self._fork(order)
            case "send" | "kill":
                self._end_refused(order)
                self.forks.order(order)
            case "ping":
                self.roll.call(order["processes"])
                for process in order["processes"]:
                    self.forks.order({"do": "send", "process": process, "message": {"do": "ping"}})
            case "shutdown":
                self.forks.order(order)
            case "logs" | "read-log":
                self._show_logs(order)

    def _fork(self, order: Message) -> None:
        process = order["process"]
        if (why := self.rules.refusal(order)) is not None:
            self._refuse(process, f"{self.node} {why}")
            return
        self.forks.order(self.rules.completed(order) | {"log": str(path_of(self.logs, process))})

    def _refuse(self, process: str, error: str) -> None:
        """In the place of a process that is not started: it says why, and is there until it is told to go, so that the
        reason comes before the end."""
        self.note(f"refused {process}: {error}")
        self._refused.add(process)
        generation = process.split(".")[1] if process.count(".") else ""
        number = int(generation) if generation.isdecimal() else 0
        for say in ("failed", "no-start"):
            message = {"say": say, "generation": number, "error": error, "code": NOT_STARTED}
            self.outbox.put({"event": "message", "process": process, "message": message})

    def _end_refused(self, order: Message) -> None:
        process = order["process"]
        if process in self._refused and (order["do"] == "kill" or order["message"]["do"] == "exit"):
            self._refused.discard(process)
            self.outbox.put({"event": "exit", "process": process, "code": NOT_STARTED})

    def _show_logs(self, order: Message) -> None:
        """Which logs a job has here, or a piece of one, as base64: a log may hold anything."""
        answer: Message = {"event": "logs", "request": order["request"]}
        if order["do"] == "logs":
            found = logs_in(self.logs, f"{order['job_id']}.")
            logs = [[log.process, log.first, log.end] for log in found[-MOST_LOGS:]]
            self.outbox.put(answer | {"logs": logs})
        else:
            data, after = read(self.logs, order["process"], order["at"], min(order["limit"], MOST_LOG_BYTES))
            self.outbox.put(answer | {"data": base64.b64encode(data).decode("ascii"), "next": after})
