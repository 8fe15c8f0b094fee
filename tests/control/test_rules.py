"""What a node refuses to start, whatever its controller asks for."""

from __future__ import annotations

from typing import Any

import pytest

from suika.agent.rules import TRAINER, Rules
from suika.runtime.gang import COMMAND_ENTRY, RANK_ENTRY, STORE_ENTRY
from suika.runtime.outside import ENTRY as OUTSIDE

STRICT, TORCHLESS = Rules(commands=False, trains=True), Rules(trains=False)


@pytest.mark.parametrize(
    ("rules", "entry", "launch", "why"),
    [
        (STRICT, RANK_ENTRY, {"program": TRAINER}, None),
        (STRICT, RANK_ENTRY, {"program": "os:system"}, "may not load os:system"),
        (STRICT, STORE_ENTRY, {}, None),
        (STRICT, COMMAND_ENTRY, {}, "runs no commands"),
        (STRICT, OUTSIDE, {"entry": RANK_ENTRY}, "runs no commands"),
        (STRICT, "os:system", {}, "does not start os:system"),
        (TORCHLESS, COMMAND_ENTRY, {}, None),
        (TORCHLESS, RANK_ENTRY, {"program": TRAINER}, "has no torch"),
        (TORCHLESS, STORE_ENTRY, {}, "has no torch"),
        (TORCHLESS, OUTSIDE, {"entry": RANK_ENTRY}, None),
        (TORCHLESS, OUTSIDE, {"entry": STORE_ENTRY}, None),
        (TORCHLESS, OUTSIDE, {"entry": "os:system"}, "ranks and stores alone"),
        (TORCHLESS, OUTSIDE, {}, "ranks and stores alone"),
    ],
)
def test_what_is_started(rules: Rules, entry: str, launch: dict[str, Any], why: str | None) -> None:
    said = rules.refusal({"do": "fork", "process": "p", "entry": entry, "launch": launch})
    assert said is None if why is None else why in str(said)
