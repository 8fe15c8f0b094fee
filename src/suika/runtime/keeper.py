"""Snapshots seen from the coordinator: a snapshot counts once every rank has written and rank 0 has published it.

Ranks write in the background, without a collective, so that neither a slow disk nor a dead rank can stop training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from suika.core.cluster import Device
from suika.runtime.events import Snapshotted
from suika.runtime.gang import Gang, Member
from suika.runtime.messages import Message


@dataclass
class _Pending:
    generation: int
    step: int
    written: set[Device] = field(default_factory=set)
    stall_s: float = 0.0


class SnapshotKeeper:
    """Follows the snapshot that is being written, and remembers the newest complete one."""

    def __init__(self, gang: Gang) -> None:
        self._gang = gang
        self._pending: _Pending | None = None
        self._failed: tuple[int, int] | None = None  # (generation, step) of one that a rank could not write
        self._published = (0, 0)  # (generation, step) of the newest one that was heard to be complete
        self.newest: tuple[str | None, int] = (None, 0)  # (path, steps done in it)
        self.error: str | None = None  # why the last one failed

    @property
    def busy(self) -> bool:
        return self._pending is not None

    def forget(self) -> None:
        """The ranks are gone: what they had not finished never will be."""
        self._pending = None

    def hear(self, ranks: Mapping[Device, Member], member: Member, message: Message) -> Snapshotted | None:
        """Take in `written`, `published` and `unwritten`; returns the event when a snapshot has become complete."""
        generation, step = message["generation"], message["step"]
        place, pending = (generation, step), self._pending
        overtaken = pending is not None and place < (pending.generation, pending.step)  # a slow rank's late word
        match message["say"]:
            case "published":
                self._published = max(self._published, place)
                stall_s = pending.stall_s if pending and not overtaken else 0.0
                if not overtaken:
                    self._pending, self.error = None, None
                if step < self.newest[1]:
                    return None
                self.newest = (message["path"], step)
                return Snapshotted(self._gang.job_id, generation, step, message["path"], stall_s)
            case _ if overtaken or place == self._failed or place <= self._published:
                return None  # after a controller's restart the last words of all ranks are told again, in any order
            case "written":
                if pending is None or (pending.generation, pending.step) != place:
                    pending = self._pending = _Pending(generation, step)
                assert member.device is not None
                pending.written.add(member.device)
                pending.stall_s = max(pending.stall_s, message["stall_s"])
                if pending.written == set(ranks):
                    self._gang.tell([next(iter(ranks.values()))], "publish", generation=generation, step=step)
            case "unwritten":
                self._pending, self._failed, self.error = None, place, message["error"]
        return None
