"""`suika top` driven by textual's pilot: over the real calls of a controller, and over a connection that is lost."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Static

from suika.cli.top_screen import Top
from suika.control.client import NoControllerError

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))
from world import World


class Line:
    """The calls of a controller in this process, over a line that a test can cut."""

    def __init__(self, world: World) -> None:
        self.calls, self.cut = world.api.calls(), False

    def __call__(self, name: str, **arguments: Any) -> Any:
        if self.cut:
            raise NoControllerError("no cluster answers")
        return self.calls[name](**arguments)


def cells(app: Top, name: str) -> list[list[str]]:
    table = app.query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row_at(index)] for index in range(table.row_count)]


def summary(app: Top) -> str:
    return str(app.query_one("#summary", Static).content)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_it_shows_jobs_nodes_and_moves_as_they_change(world: World) -> None:
    run = world.start("first", "n0/0", "n0/1")
    world.submit("second")
    world.turn()

    async def watch() -> None:
        app = Top(60.0, Line(world))
        async with app.run_test(size=(160, 40)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            shown = sorted(
                row[:2] for row in cells(app, "jobs")
            )  # submitted at the same instant, they come in any order
            assert shown == [["first", "running"], ["second", "queued"]]
            assert cells(app, "nodes")[0] == ["n0", "cpu", "##..", "ready"]
            assert cells(app, "moves")[0][1:3] == ["first", "start"]
            assert "8 devices: 6 free, 2 used" in summary(app)
            run.steps(7)
            world.decide(world.grant("first", "n1/0", "n1/1"))
            run.moved()
            world.turn()
            await pilot.press("r")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert cells(app, "nodes")[1][2] == "##.."
            assert cells(app, "moves")[0][1:3] == ["first", "redeploy"]
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(watch())


def test_a_lost_connection_is_said_and_what_was_seen_stays(world: World) -> None:
    world.start("first", "n0/0")

    async def watch() -> None:
        line = Line(world)
        app = Top(60.0, line)
        async with app.run_test(size=(160, 40)) as pilot:
            await app.workers.wait_for_complete()
            await pilot.pause()
            line.cut = True
            await pilot.press("r")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "NO CONNECTION" in summary(app)
            assert "no cluster answers" in summary(app)
            assert cells(app, "jobs")[0][0] == "first"
            line.cut = False
            await pilot.press("r")
            await app.workers.wait_for_complete()
            await pilot.pause()
            assert "NO CONNECTION" not in summary(app)

    asyncio.run(watch())
