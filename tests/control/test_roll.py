"""A roll call is answered once for all; who is late answers by himself."""

from __future__ import annotations

import time

from suika.agent.roll import RollCall


def test_one_answer_for_all_as_soon_as_all_have_answered() -> None:
    told: list[list[str]] = []
    roll = RollCall(told.append, within_s=30.0)
    roll.call(["a", "b"])
    roll.call(["c"])
    assert [roll.answered(name) for name in ("b", "a", "stranger", "c")] == [True, True, False, True]
    assert told == [["b", "a", "c"]]
    assert not roll.answered("a"), "once"


def test_those_who_have_answered_are_told_though_one_is_late() -> None:
    told: list[list[str]] = []
    roll = RollCall(told.append, within_s=0.05)
    roll.call(["a", "stopped"])
    assert roll.answered("a")
    deadline = time.monotonic() + 5
    while not told and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told == [["a"]]
    assert not roll.answered("stopped"), "what it says at last is passed on"
    roll.call(["a"])
    assert roll.answered("a")
    assert told == [["a"], ["a"]]
