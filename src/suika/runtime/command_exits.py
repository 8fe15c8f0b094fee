"""How the ranks of a command ended, and what becomes of the command then. No torch.

`Exits` has each rank, in order, with what it said when its program ended; None: it runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from suika.runtime.gang import Member
from suika.runtime.messages import Message

Exits = Mapping[Member, Message | None]
_SIGNALLED = 128  # exit code of a program that a signal ended: this and its number, as shells have it


def is_over(exits: Exits) -> bool:
    """Whether every rank has ended, or one has failed."""
    return all(exits.values()) or first_failure(exits) is not None


def first_failure(exits: Exits) -> tuple[str, int] | None:
    """How the rank that failed first did, in words and as an exit code; None: no rank has failed."""
    failed = [(said["at_s"], rank) for rank, said in enumerate(exits.values()) if said and said["code"]]
    if not failed:
        return None
    _, rank = min(failed)
    member, said = list(exits.items())[rank]
    assert said is not None
    code = said["code"]
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"rank {rank} on {member.device} {how}", exit_code(code)


def exit_code(code: int) -> int:
    return code if code >= 0 else _SIGNALLED - code
