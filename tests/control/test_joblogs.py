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


def test_a_set_up_is_shown_with_its_node(world: World) -> None:
    world.start("a", "n0/0")
    job = world.job("a")

    class Both(Rotating):
        def logs(self, node: str, job_id: str) -> list[Log]:
            names = (
                "x",
                f"{job_id}.setup",
                f"{job_id}.setup.1.0.n0",
                f"{job_id}.setup.1.0.n1",
                f"{job_id}.store.ab12",
                f"{job_id}.1.n0/0",
            )
            return [Log(name, 0, len(LINES), 0.0) for name in names]

    logs = JobLogs(world.controller.state, Both(""))
    shown = [(entry["device"], entry["rank"]) for entry in logs.page(job, None, None, None)["entries"]]
    assert shown == [("n0 set-up", None), ("n0/0", 0)]
    assert [entry["device"] for entry in logs.page(job, 0, None, None)["entries"]] == ["n0/0"]


def test_what_was_shown_is_not_shown_again_after_a_rotation(world: World) -> None:
    world.start("a", "n0/0")
    logs = JobLogs(world.controller.state, Rotating(f"{world.job('a').id}.1.n0/0"))
    first = logs.page(world.job("a"), None, None, None)
    assert [entry["text"] for entry in first["entries"]] == ["three\nfour\n"]
    assert logs.page(world.job("a"), None, None, first["cursor"])["entries"] == []
