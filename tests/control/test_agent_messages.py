"""What a node says of a move is checked before anything acts on it."""

from __future__ import annotations

from typing import Any

import pytest

from suika.agent.link import LinkError
from suika.agent.words import check_event


def prepared(**more: Any) -> dict[str, Any]:
    said = {"say": "prepared", "generation": 2, "digest": "x", "network_bytes": 8}
    return {"event": "message", "process": "j.2.0", "message": {**said, **more}}


@pytest.mark.parametrize("more", [{}, {"mode": "keep"}, {"mode": "lean"}], ids=["older node", "keep", "lean"])
def test_modes_of_moves_are_taken(more: dict[str, Any]) -> None:
    assert check_event(prepared(**more))


@pytest.mark.parametrize("mode", ["fast", "", 3, None, ["keep"]])
def test_other_modes_are_refused(mode: Any) -> None:
    with pytest.raises(LinkError, match="no such mode"):
        check_event(prepared(mode=mode))
