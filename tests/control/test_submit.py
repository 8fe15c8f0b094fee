"""What is refused at submit is refused at once with field and fix, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import World

from suika.core.errors import SpecError
from suika.core.job import JobState

MODEL = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}

NAMES = ("", "a/b", "../x", "$(id)", "a b", "-a", "A", "a" * 64, "ä", "a\n", "a;b", "~")

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"stepz": 5}, "job.stepz", "known: name"),
    ({"model": MODEL | {"layer": 4}}, "job.model", "unknown keys"),
    ({"optimizer": {"learning_rate": 1}}, "job.optimizer.learning_rate", "not permitted"),
    ({"devices": {"min": 73, "max": 73}}, "job.devices.min", "73 of 8 devices"),
    ({"devices": {"min": 4, "max": 2}}, "job.devices", "raise max or lower min"),
    ({"devices": {"min": 1, "max": 2, "type": "H100"}}, "job.devices.type", "known: cpu"),
    ({"layout": {"tp": 3}}, "layout.tp", "heads(4) % tp(3)"),
    ({"layout": {"pp": 5}}, "layout.pp", "layers(4) < pipeline chunks(5)"),
    ({"layout": {"dp": 8, "pp": 2}, "devices": {"min": 1, "max": 16}}, "layout", "micro-batches"),
    ({"layout": {"tp": 2, "dp": 8}, "devices": {"min": 1, "max": 16}}, "job.devices.min", "16 of 8 devices"),
    (
        {"layout": {"tp": 8}, "model": MODEL | {"heads": 8, "ffn": 128, "hidden": 64}},
        "job.layout.tp",
        "largest node(4)",
    ),
    ({"layout": {"dp": 3}, "devices": {"min": 1, "max": 2}}, "job", "outside devices"),
    ({"layout": {"tp": 2, "color": 1}}, "layout", "unknown keys"),
    ({"data": "/no/such/file"}, "job.data", "does not exist"),
    ({"data": "relative/file"}, "job.data", "absolute"),
    ({"data": "/etc/\0passwd"}, "job.data", "not a path"),
    ({"steps": 0}, "job.steps", "greater than or equal to 1"),
    ({"global_batch": "many"}, "job.global_batch", "integer"),
    ({"optimizer": {"lr": float("nan")}}, "job.optimizer.lr", "finite"),
    ({"precision": "int4"}, "job.precision", "bf16"),
    (
        {"model": MODEL | {"experts": 4, "experts_per_token": 2}, "layout": {"ep": 3, "dp": 3}},
        "layout.ep",
        "experts(4) % ep",
    ),
    ({"model": MODEL | {"vocab": 200}}, "job.model.vocab", "257"),
    ({"layout": {"zero": 2}}, "layout.zero", "use 0, 1 or 3"),
    ({"layout": {"dp": 3, "zero": 3}}, "layout.zero", "micro-batches"),
    ({"model": MODEL | {"frozen": ["layers.9.*"]}}, "model.frozen", "matches no tensor"),
    ({"model": MODEL | {"frozen": ["*"]}}, "model.frozen", "nothing to train"),
    ({"model": MODEL | {"lora": {"rank": 4, "targets": ["x"]}}}, "job.model.lora.targets.0", "'q', 'k'"),
    ({"model": MODEL | {"dropout": 1.0}}, "model.dropout", "< 1"),
    *(
        ({"name": name}, "job.name", "lower-case")
        for name in ("", "a/b", "../x", "$(id)", "a b", "-a", "A", "a" * 64, "ä")
    ),
    ({"tenant": "x;y"}, "job.tenant", "lower-case"),
]


@pytest.mark.parametrize(("changes", "field", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_and_nothing_started(world: World, changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(SpecError) as refusal:
        world.api.submit(world.file("fine") | changes)
    assert refusal.value.field == field
    assert text in str(refusal.value)
    world.turn()
    assert world.store.jobs() == ()
    assert world.store.events() == ()
    assert world.runs == {}


def test_a_type_may_be_called_by_any_of_its_names(world: World) -> None:
    """The world's nodes are of type `cpu`."""
    shown = world.api.submit(world.file("fine") | {"devices": {"min": 1, "max": 2, "type": "x86_64"}}, dry_run=True)
    assert shown["options"]


@pytest.mark.parametrize("body", [None, 3, "text", [], [{}]])
def test_a_job_file_that_is_no_mapping(world: World, body: Any) -> None:
    with pytest.raises(SpecError, match="must be a mapping"):
        world.api.submit(body)


def test_empty_data_is_refused(world: World, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for path in ("empty", "folder"):
        with pytest.raises(SpecError, match="is empty"):
            world.submit("a", data=str(tmp_path / path))
    (tmp_path / "short").write_text("tiny")
    with pytest.raises(SpecError, match=r"4 bytes.*17"):
        world.submit("a", data=str(tmp_path / "short"))


def test_a_dry_run_shows_the_options_and_accepts_nothing(world: World) -> None:
    shown = world.api.submit(world.file("a"), dry_run=True)
    assert [option["devices"] for option in shown["options"]] == [1, 2, 3, 4]
    assert world.store.jobs() == ()


def test_what_no_node_can_hold_any_more_is_unsatisfiable_until_it_can(world: World) -> None:
    """The cluster's shape is fixed here, so a fixed layout on a type that fits no node stands for lost hardware."""
    world.submit("a", devices={"min": 8, "max": 8}, layout={"dp": 8})
    world.turn()
    # dp=8 as one shape of 8 devices: no node of 4 holds it.
    assert world.job("a").state is JobState.UNSATISFIABLE
    assert "could ever hold" in world.api.explain("a")["reason"]["sentence"]
    world.api.resize("a", layout="dp=4")
    world.turn()
    assert world.job("a").state is JobState.QUEUED
