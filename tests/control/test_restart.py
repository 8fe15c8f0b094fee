"""What a new controller shows of a job whose move its predecessor did not live to see the end of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from world import World

from suika.control.adopt import Adoption
from suika.control.controller import Controller
from suika.control.views import take_snapshot
from suika.core.cluster import Device


@pytest.mark.parametrize("committed", [False, True])
def test_a_move_counts_once_it_is_committed(world: World, committed: bool) -> None:
    """One that is not will be called off: the job keeps what it has, and counts as that for its tenant's maximum."""
    run = world.start("a", "n0/0", "n0/1", "n0/2")
    world.decide(world.grant("a", "n0/0", "n1/0"))
    if committed:
        _, _, _, commit, _ = run.move
        assert commit()
    again = Controller(world.cluster, world.store, world.policy, world.controller.pricing, world, lambda: world.now)
    roster: Any = SimpleNamespace(found={}, devices_away=lambda devices: list(devices))
    launcher: Any = SimpleNamespace(run_again=lambda job, hear: world.run(job, world.data, hear))
    Adoption(again, roster, SimpleNamespace(lease_s=60.0), launcher).begin()  # type: ignore[arg-type]
    snapshot = take_snapshot(again.state, again.pricing)
    (view,) = snapshot.jobs
    assert list(map(str, view.devices)) == (["n0/0", "n1/0"] if committed else ["n0/0", "n0/1", "n0/2"])
    assert snapshot.promised.keys() == (set() if committed else {Device("n1", 0)})
    if not committed:
        again.observer.move_failed(view.id, "the controller was restarted")
        assert again.state.releasing == {}
        assert len(take_snapshot(again.state, again.pricing).jobs[0].devices) == 3
    again.close()
