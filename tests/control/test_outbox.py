"""What an agent tells a controller that knows nothing of its node: first what there is, then what happens."""

from __future__ import annotations

from typing import Any

from suika.agent.outbox import Outbox

STEP = {"event": "message", "process": "j.1.n0/0", "message": {"say": "step", "step": 1}}


def hello(asked: int | None) -> dict[str, Any]:
    return {"event": "hello", "processes": [{"process": "j.1.n0/0", "pid": 7}], "exits": [], "asked": asked}


def test_nothing_is_news_before_the_answer_to_the_newest_question() -> None:
    asked: list[int] = []
    told: list[dict[str, Any]] = []
    outbox = Outbox(asked.append)
    outbox.tell(hello(None))  # what a fork server says to whoever connects
    outbox.tell(STEP)
    outbox.connect(lambda frame: told.append(frame["m"]), 0, resumes=False)
    outbox.ask_for_everything()  # it has died, and there is another
    assert asked == [1, 2]
    outbox.tell(hello(1))
    outbox.tell(STEP)
    assert (told, outbox.is_awaiting) == ([], True)
    outbox.tell(hello(2))
    outbox.tell(STEP)
    assert not outbox.is_awaiting
    assert told == [{"event": "hello", "processes": hello(2)["processes"]}, STEP]


def test_who_knows_this_node_is_told_what_it_missed_and_no_more() -> None:
    asked: list[int] = []
    told: list[dict[str, Any]] = []
    outbox = Outbox(asked.append)
    outbox.connect(lambda frame: None, 0, resumes=False)
    outbox.tell(hello(1))
    outbox.disconnect()
    outbox.tell(STEP)
    outbox.connect(lambda frame: told.append(frame["m"]), 1, resumes=True)
    assert (asked, told) == ([1], [STEP])
