"""A store that is away for a moment while running jobs are taken back: they are taken back when it is there again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_copy_adoption import Agent, Restarted
from world import World

from suika.control.store import StoreAwayError
from suika.core.job import JobState


@pytest.mark.parametrize("broken", ["events", "append"])
def test_ranks_are_taken_back_after_all(
    world: World, tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.start("train", "n0/0", "n0/1", memory_copy_every_steps=5)
    job = world.job("train")
    again = Restarted(world, tmp_path)
    real, refused = getattr(world.store, broken), []

    def away(*given: Any, **named: Any) -> Any:
        concerns_it = named.get("job_id") == job.id if broken == "events" else given[1] == "taken-back"
        if concerns_it and not refused:
            refused.append(given)
            raise StoreAwayError("away for a moment")
        return real(*given, **named)

    monkeypatch.setattr(world.store, broken, away)
    ranks = {f"{job.id}.{job.generation}.n0/{index}": 40 + index for index in (0, 1)}
    node = Agent(again.hub, "n0", {}, **ranks)
    node.come()
    for _ in range(20):
        again.controller.turn(0.02)
    assert refused
    assert node.processes == ranks, "nobody was ended"
    assert sorted(map(str, again.runs[0].ranks)) == ["n0/0", "n0/1"]
    assert world.job("train").state is JobState.RUNNING
    assert world.kinds("train").count("taken-back") == 1
    again.close()
