"""What becomes of a command when its ranks end."""

from __future__ import annotations

from typing import Any

from suika.core.cluster import Device
from suika.runtime.command_exits import exit_code, first_failure, is_over
from suika.runtime.gang import Member


def exits(*ends: tuple[int, float] | None) -> dict[Member, dict[str, Any] | None]:
    """(exit code, when it was heard of) of each rank; None: it runs."""
    ranks = [Member(f"j1.1.n0/{rank}", Device("n0", rank), 0.0) for rank in range(len(ends))]
    said = [None if end is None else {"say": "exited", "code": end[0], "at_s": end[1]} for end in ends]
    return dict(zip(ranks, said, strict=True))


def test_it_is_over_when_all_have_ended_or_one_has_failed() -> None:
    assert not is_over(exits(None, None))
    assert not is_over(exits((0, 1.0), None))
    assert is_over(exits((0, 1.0), (0, 2.0)))
    assert is_over(exits(None, (3, 2.0)))


def test_the_failure_that_was_heard_of_first_counts() -> None:
    assert first_failure(exits((0, 1.0), None)) is None
    assert first_failure(exits((0, 1.0), (3, 5.0), (4, 2.0))) == ("rank 2 on n0/2 ended with code 4", 4)
    assert first_failure(exits(None, (-9, 5.0), (4, 5.0))) == ("rank 1 on n0/1 was ended by signal 9", 137)


def test_exit_codes_are_those_of_a_shell() -> None:
    assert [exit_code(code) for code in (0, 2, -15)] == [0, 2, 143]
