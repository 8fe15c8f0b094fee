"""Who is asked for a sign of life: nobody who has just taken part in a step, everybody once steps stay away."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from suika.core.cluster import Device
from suika.runtime.gang import RANK_ENTRY, DiedError, Gang, Limits


class Asked:
    def __init__(self) -> None:
        self.pinged: list[str] = []
        self.killed: list[str] = []

    def spawn(self, process: str, node: str, entry: str, launch: Mapping[str, Any], listener: object) -> None:
        pass

    def send(self, process: str, message: Mapping[str, Any]) -> None:
        if message["do"] == "ping":
            self.pinged.append(process)

    def kill(self, process: str) -> None:
        self.killed.append(process)


def test_a_step_vouches_for_all_its_ranks() -> None:
    processes = Asked()
    gang = Gang("j", processes, lambda member, message: None, Limits(silent_s=0.6, answer_s=0.6))
    ranks = [gang.spawn(f"j.1.n0/{index}", "n0", Device("n0", index), RANK_ENTRY, {}) for index in range(8)]
    joiner = gang.spawn("j.2.n1/0", "n1", Device("n1", 0), RANK_ENTRY, {})
    until_s = time.monotonic() + 1.0
    while time.monotonic() < until_s:
        gang.vouch(ranks)
        gang.pump()
    assert set(processes.pinged) == {joiner.process}, "it takes part in no step yet"

    def listen() -> None:
        while True:
            gang.post({"event": "message", "process": joiner.process, "message": {"say": "pong"}})
            gang.pump()

    with pytest.raises(DiedError, match="did not answer"):
        listen()
    assert {rank.process for rank in ranks} <= set(processes.pinged)
    assert processes.killed[0] in {rank.process for rank in ranks}
