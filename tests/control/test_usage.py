"""Usage by tenant: from events alone, in any window, over moves, preemptions, failures and restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from world import World

from suika.control.database import DatabaseStore
from suika.control.store import News
from suika.control.usage import UsageBook
from suika.core.cluster import Device
from suika.core.errors import SpecError
from suika.core.job import Job, parse_job
from suika.runtime.events import Outcome


def row_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in report["jobs"] if row["name"] == name]
    return row


def test_what_a_job_held_and_how_long_it_waited(world: World) -> None:
    world.submit("a", tenant="research")
    world.turn(10.0)
    world.decide(world.grant("a", "n0/0", "n0/1"))
    run = world.runs["a"]
    run.started()
    world.turn(5.0)  # starting, then running: two devices from 110 on
    world.turn(15.0)
    world.decide(world.grant("a", "n0/1", "n1/0", "n1/1"))
    world.turn(4.0)
    run.moved()
    world.turn(6.0)  # moving from 130 to 140, when the loop hears of the commit: what it has and what it gets, four
    world.decide(world.preempt("a"))
    world.turn(2.0)
    run.saved(5)
    run.ended(Outcome.PREEMPTED, saved=5)
    world.turn(8.0)  # three while it saves, from 140 to 150
    world.turn(10.0)
    report = world.api.usage()
    row = row_of(report, "a")
    assert row["device_s"] == pytest.approx(2 * 20 + 4 * 10 + 3 * 10)
    assert row["waiting_s"] == pytest.approx(10 + 10)
    assert (row["device_type"], row["tenant"], row["failed_moves"]) == ("cpu", "research", 0)
    assert report["tenants"] == [
        {
            "tenant": "research",
            "device_s": pytest.approx(110.0),
            "device_s_by_type": {"cpu": pytest.approx(110.0)},
            "jobs": 1,
            "waiting_s": pytest.approx(20.0),
            "moves": row["moves"],
            "failed_moves": 0,
            "moved_bytes": row["moved_bytes"],
        }
    ]


def test_windows_add_up_and_the_end_closes_the_account(world: World) -> None:
    run = world.start("a", "n0/0", "n0/1")
    world.start("b", "n1/0", tenant="other")
    for _ in range(6):
        world.turn(10.0)
    run.ended(Outcome.FINISHED)
    world.turn()
    world.turn(40.0)
    whole = world.api.usage()
    assert row_of(whole, "a")["device_s"] == pytest.approx(2 * 60.0)
    assert row_of(whole, "b")["device_s"] == pytest.approx(100.0)
    parts = [world.api.usage(since, since + 25.0) for since in (100.0, 125.0, 150.0, 175.0)]
    for tenant in ("default", "other"):
        shares = [total["device_s"] for part in parts for total in part["tenants"] if total["tenant"] == tenant]
        (total,) = [total for total in whole["tenants"] if total["tenant"] == tenant]
        assert sum(shares) == pytest.approx(total["device_s"])
    assert [total["tenant"] for total in world.api.usage(tenant="other")["tenants"]] == ["other"]
    with pytest.raises(SpecError, match="usage.since"):
        world.api.usage(since=500.0)


def test_a_failed_move_gives_back_what_it_had_taken(world: World) -> None:
    run = world.start("a", "n0/0")
    world.decide(world.grant("a", "n0/1", "n0/2"))
    world.turn(3.0)
    run.aborted("a link broke")
    world.turn()
    world.turn(7.0)
    row = row_of(world.api.usage(), "a")
    assert row["device_s"] == pytest.approx(3 * 3.0 + 7.0)
    assert (row["moves"], row["failed_moves"]) == (0, 1)


def test_the_delivery_of_a_final_checkpoint_holds_nothing(world: World) -> None:
    """Its processes are gone, and others may have the devices; nor does it wait for any."""
    run = world.start("a", "n0/0", "n0/1")
    world.turn(10.0)
    run.released({Device("n0", 0), Device("n0", 1)})
    world.turn()
    world.turn(50.0)  # the copy takes as long
    world.store.append(world.now, "job-finished", world.job("a").id)
    row = row_of(world.api.usage(), "a")
    assert (row["device_s"], row["waiting_s"]) == (pytest.approx(20.0), pytest.approx(0.0))


def test_a_tenant_sees_only_its_own(world: World) -> None:
    world.start("a", "n0/0", tenant="research")
    world.start("b", "n0/1", tenant="secret")
    world.turn(10.0)
    report = world.api.usage_seen_by(lambda tenant: tenant == "research", None, None, None)
    assert "secret" not in str(report)
    assert world.api.usage_seen_by(lambda tenant: tenant == "research", None, None, "secret")["jobs"] == []


def test_ages_are_by_the_controllers_clock(world: World) -> None:
    """An emulated cluster's runs many times as fast as the caller's."""
    world.start("secret", "n0/1", tenant="secret")
    world.turn(100.0)
    world.start("a", "n0/0", tenant="research")
    world.turn(100.0)
    report = world.api.usage(since=-60.0, until=-20.0)
    assert (report["since_s"], report["until_s"]) == (world.now - 60.0, world.now - 20.0)
    assert row_of(report, "a")["device_s"] == pytest.approx(40.0)
    mine = world.api.usage_seen_by(lambda tenant: tenant == "research", None, None, None)
    assert mine["since_s"] == world.job("a").submitted_s, "when others began is theirs to know"


def test_a_restart_changes_nothing_of_it(tmp_path: Path) -> None:
    """The same database read by a book of this life and by one of the next."""
    url = f"sqlite:///{tmp_path}/suika.db"
    model = {"family": "llama", "layers": 4, "hidden": 32, "ffn": 64, "heads": 4, "vocab": 257}
    body = {"name": "a", "model": model, "data": "/text", "global_batch": 8, "sequence_length": 16, "steps": 50}
    spec = parse_job(body)
    store = DatabaseStore(url)
    told = {"spec": spec.model_dump(mode="json"), "body": ""}
    store.add(Job("j1", spec, 100.0), News(100.0, "submitted", told))
    book = UsageBook(store)
    store.append(101.0, "decided", "j1", devices=["n0/0", "n0/1"], action="start")
    store.append(110.0, "job-starting", "j1")
    before = book.report(150.0, lambda node: "A800")
    store.close()
    again = DatabaseStore(url)
    assert UsageBook(again).report(150.0, lambda node: "A800") == before
    again.append(160.0, "job-finished", "j1")
    assert row_of(UsageBook(again).report(500.0, lambda node: "A800"), "a")["device_s"] == pytest.approx(100.0)
    again.close()
