"""`suika events`: the newest by default, and it says when there are more than it shows."""

from __future__ import annotations

from typing import Any

import pytest

from suika.cli import events
from suika.control.memory_store import MemoryStore
from suika.control.store import Which


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """2,500 events behind the call, which gives a thousand at a time."""
    store, calls = MemoryStore(), []
    for number in range(2500):
        store.append(float(number), "tick")

    def ask(call: str, **arguments: Any) -> list[dict[str, Any]]:
        calls.append(arguments)
        assert arguments["limit"] <= 1000
        which = Which(before=arguments.get("before"), since_s=arguments["since"], last=arguments.get("newest", False))
        return [event.to_dict() for event in store.events(arguments.get("after", 0), None, arguments["limit"], which)]

    monkeypatch.setattr(events, "ask", ask)
    return calls


@pytest.mark.parametrize(
    ("options", "first", "last", "said"),
    [
        ({}, 2301, 2500, "200 events, older ones are not shown"),
        ({"limit": 1800}, 701, 2500, "older ones are not shown"),
        ({"limit": 2500}, 1, 2500, ""),
        ({"limit": 9999}, 1, 2500, ""),
        ({"after": 0}, 1, 200, "go on with --after 200"),
        ({"after": 700, "limit": 1800}, 701, 2500, ""),
        ({"after": 2400}, 2401, 2500, ""),
        ({"since": "1970-01-01T00:40:00+00:00"}, 2401, 2500, ""),
        ({"since": "1970-01-01T00:30:00+00:00", "limit": 3}, 2498, 2500, "older ones are not shown"),
    ],
)
def test_which_are_shown(
    asked: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
    first: int,
    last: int,
    said: str,
) -> None:
    events.events(**({"limit": 200} | options))
    shown = capsys.readouterr()
    numbers = [int(line.split()[0]) for line in shown.out.splitlines()[1:]]
    assert numbers == list(range(first, last + 1))
    assert said in shown.err
    assert bool(said) == bool(shown.err)
