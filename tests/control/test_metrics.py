"""The names that dashboards rely on: each with its kind and its labels, as Prometheus' own parser reads them."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families
from world import World

from suika.control.metrics import Metrics
from suika.core.plan import Plan
from suika.core.redeployment import Phase, Redeployment
from suika.runtime.events import Measured, Outcome

# name -> (kind, labels); a counter's `_total` belongs to its samples.
NAMES = {
    "suika_jobs": ("gauge", {"state"}),
    "suika_job_wait_seconds": ("histogram", set()),
    "suika_job_completion_seconds": ("histogram", set()),
    "suika_decisions": ("counter", {"action", "reason"}),
    "suika_cycle_duration_seconds": ("histogram", set()),
    "suika_redeployments": ("counter", {"result"}),
    "suika_redeploy_duration_seconds": ("histogram", {"phase"}),
    "suika_redeploy_bytes": ("counter", {"link"}),
    "suika_redeploy_pause_seconds": ("histogram", set()),
    "suika_devices": ("gauge", {"state"}),
    "suika_fragmentation_ratio": ("gauge", set()),
    "suika_estimator_relative_error_ratio": ("gauge", {"job"}),
    "suika_lost_device_seconds": ("counter", {"cause"}),
    "suika_slow_devices": ("gauge", set()),
    "suika_copies_bytes": ("gauge", {"node"}),
    "suika_backend_up": ("gauge", {"backend"}),
    "suika_build_info": ("gauge", {"version"}),
}


def test_names_kinds_and_labels(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    run.steps(7, step_s=2.0)  # measured: it now has an error
    world.decide(world.grant("a", "n1/0", "n1/1"))
    old, new = world.job("a").plan, world.job("a").target
    assert isinstance(old, Plan)
    assert isinstance(new, Plan)
    run.moved()
    phases = {phase.value: 0.5 for phase in (Phase.PREPARE, Phase.CUT, Phase.MOVE)}
    move = Redeployment(
        run.job_id,
        2,
        old,
        new,
        world.job("a").reason,
        Phase.RELEASE,
        moved_bytes=100,
        network_bytes=60,
        pause_s=0.25,
        phase_s=phases,
    )
    run.on_event(Measured(run.job_id, 2, move))
    run.steps(7, step_s=2.0)
    world.turn(5.0)
    world.decide()
    text = Metrics(world.api, lambda: {"agents": True}).text()
    families = text_string_to_metric_families(text)
    found = {family.name: family for family in families if not family.name.endswith("_created")}
    assert {name: family.type for name, family in found.items()} == {name: kind for name, (kind, _) in NAMES.items()}
    for name, (_, labels) in NAMES.items():
        samples = found[name].samples
        assert samples, name
        assert {label for s in samples for label in s.labels} - {"le"} == labels, name
    value = {(s.name, *sorted(s.labels.values())): s.value for family in found.values() for s in family.samples}
    assert value["suika_redeploy_bytes_total", "network"] == 60
    assert value["suika_redeploy_bytes_total", "node"] == 40
    assert value["suika_lost_device_seconds_total", "move"] == pytest.approx(0.5)
    assert value["suika_redeployments_total", "committed"] == 1
    assert value["suika_backend_up", "agents"] == 1
    run.ended(Outcome.FINISHED)
    world.turn()
