"""Who waits for a job waits over an outage of the controller, but not for ever."""

from __future__ import annotations

from typing import Any

import pytest

from suika.cli import ask, jobs
from suika.control.client import NoControllerError


class Away:
    """A controller that does not answer the first `times` calls."""

    def __init__(self, times: int) -> None:
        self.times, self.calls = times, 0

    def __call__(self, call: str, **arguments: Any) -> Any:
        self.calls += 1
        if self.calls <= self.times:
            raise NoControllerError("no cluster answers")
        return {"state": "failed", "exit_code": 7}


def test_a_wait_goes_on_over_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    away = Away(3)
    monkeypatch.setattr(ask, "reach", away)
    monkeypatch.setattr(ask, "_AGAIN_S", 0.01)
    assert jobs._wait_for_end("j1")["exit_code"] == 7
    assert away.calls == 4


def test_a_single_question_and_a_long_outage_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    away = Away(1_000_000)
    monkeypatch.setattr(ask, "reach", away)
    monkeypatch.setattr(ask, "_AGAIN_S", 0.01)
    for patience_s in (0.0, 0.05):
        with pytest.raises(SystemExit) as left:
            ask.ask("jobs", patience_s=patience_s)
        assert left.value.code == ask.NO_CLUSTER
    assert away.calls > 3
    assert capsys.readouterr().err == "suika: no cluster answers\n" * 2
