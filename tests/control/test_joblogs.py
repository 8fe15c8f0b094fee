"""Logs that are rotated while they are read."""

from __future__ import annotations

from world import World

from suika.control.joblogs import JobLogs
from suika.runtime.logs import Log

LINES = b"one\ntwo\nthree\nfour\n"


class Rotating:
    """The oldest part, 8 bytes, goes after the node was asked which logs there are."""

    def __init__(self, process: str) -> None:
        self.process = process

    def logs(self, node: str, job_id: str) -> list[Log]:
        return [Log(self.process, 0, len(LINES), 0.0)]

    def read(self, node: str, process: str, at: int, limit: int) -> tuple[bytes, int]:
        data = LINES[max(at, 8) :][:limit]
        return data, max(at, 8) + len(data)


def test_what_was_shown_is_not_shown_again_after_a_rotation(world: World) -> None:
    world.start("a", "n0/0")
    logs = JobLogs(world.controller.state, Rotating(f"{world.job('a').id}.1.n0/0"))
    first = logs.page(world.job("a"), None, None, None)
    assert [entry["text"] for entry in first["entries"]] == ["three\nfour\n"]
    assert logs.page(world.job("a"), None, None, first["cursor"])["entries"] == []
