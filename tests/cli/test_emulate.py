"""Emulated agents need no torch, and say at once that they run no commands."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from suika.agent import program, rules
from suika.cli.ask import NO_CLUSTER
from suika.cli.emulate import act_out
from suika.core import installed
from suika.runtime.gang import COMMAND_ENTRY, RANK_ENTRY


def test_what_emulated_agents_start_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[rules.Rules] = []

    class Agent:
        def __init__(self, *arguments: Any) -> None:
            self.node = arguments[2]
            given.extend(each for each in arguments if isinstance(each, rules.Rules))

        def run(self) -> None:
            raise program.RefusedError("seen enough")

        def stop(self) -> None:
            pass

    find = installed.find_spec
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name in installed.TO_TRAIN else find(name))
    monkeypatch.setattr(program, "Agent", Agent)
    monkeypatch.setattr(threading, "stack_size", lambda size: None)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(SystemExit) as left:
        act_out("http://127.0.0.1:1", "token", "2x4:A800", 10.0, None, tmp_path, None)
    assert left.value.code == NO_CLUSTER
    assert len(given) == 2
    for each in given:
        assert each.refusal({"entry": RANK_ENTRY, "launch": {}}) is None
        assert "nothing to act by" in str(each.refusal({"process": "j.1.n0/0", "entry": COMMAND_ENTRY, "launch": {}}))
