"""A holder to which something happens at a named point of its work, as a test wants it. The fork server loads it.

`launch["fault"]`: `point`, `do` (kill, stop, cut or refuse), `times` (how often the point is passed unharmed), and
`mark`, a file that is made when it happens.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suika.runtime import frames, holder
from suika.runtime.messages import Channel

POINTS = ("taken", "summed", "sending", "half sent", "sent", "room", "half received", "received", "kept", "dropping")


def main(channel: Channel, launch: Mapping[str, Any]) -> None:
    if "fault" in launch:
        _prepare(Fault(**launch["fault"]))
    holder.main(channel, launch)


class Fault:
    def __init__(self, point: str, do: str, times: int, mark: str) -> None:
        self.point, self.do, self.times, self.mark = point, do, times, Path(mark)

    def at(self, point: str, line: socket.socket | None = None) -> None:
        if point != self.point or self.mark.exists():
            return
        self.times -= 1
        if self.times >= 0:
            return
        self.mark.touch()
        match self.do:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "refuse":
                raise MemoryError("refused, as the test wanted")
            case "cut":
                if line is not None:
                    line.shutdown(socket.SHUT_RDWR)
                raise ConnectionError("cut, as the test wanted")


def _prepare(fault: Fault) -> None:
    class Faulty(holder.Holder):
        def _take_over(self, line: socket.socket) -> None:
            fault.at("taken", line)
            super()._take_over(line)

        def _send_on(self, *about: Any) -> None:
            fault.at("sending")
            super()._send_on(*about)
            fault.at("sent")

        def _keep(self, key: holder.Key, *about: Any) -> None:
            fault.at("received" if key.copied else "summed")
            super()._keep(key, *about)
            fault.at("kept")

        def _drop(self, *about: Any) -> None:
            fault.at("dropping")
            super()._drop(*about)

    room, send_file, receive_into = holder.room, frames.send_file, frames.receive_into

    def some_room(num_bytes: int) -> Any:
        fault.at("room")
        return room(num_bytes)

    def send_in_halves(line: socket.socket, fd: int, start: int, stop: int) -> None:
        send_file(line, fd, start, stop // 2)
        fault.at("half sent", line)
        send_file(line, fd, stop // 2, stop)

    def receive_in_halves(line: socket.socket, memory: memoryview) -> None:
        receive_into(line, memory[: len(memory) // 2])
        fault.at("half received", line)
        receive_into(line, memory[len(memory) // 2 :])

    holder.Holder, holder.room = Faulty, some_room  # type: ignore[misc]
    frames.send_file, frames.receive_into = send_in_halves, receive_in_halves
