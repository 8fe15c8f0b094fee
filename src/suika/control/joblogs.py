"""What a job's processes printed, from wherever they ran: over moves, restarts and rotation, page by page.

A cursor says for each process how much of it was read. It holds positions only: which logs a reader may see is decided
anew at each page.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from suika.control.agents import AgentHub, UnreachableError
from suika.control.state import State
from suika.control.store import Event, Which
from suika.core.cluster import Device
from suika.core.errors import SpecError, require
from suika.core.job import ENDED, Job
from suika.core.plan import Plan
from suika.runtime import logs as files
from suika.runtime import setup
from suika.runtime.adopt import ProcessName

PAGE_BYTES = 256 << 10
_PIECE_BYTES = 64 << 10  # of one process, at a time
_MOST_CURSOR_BYTES = 4 << 20
MOST_LINES = 10_000
_PLACES = Which(frozenset(("decided", "launched", "committed")))  # what is told of where a job ran


class Shelf(Protocol):
    """Where logs lie."""

    def logs(self, node: str, job_id: str) -> list[files.Log]:
        """Of the job's processes that ran on `node`. Raises `UnreachableError`."""
        ...

    def read(self, node: str, process: str, at: int, limit: int) -> tuple[bytes, int]:
        """As `runtime.logs.read`. Raises `UnreachableError`."""
        ...


class NodesShelf:
    """On the nodes, asked through their agents."""

    def __init__(self, hub: AgentHub) -> None:
        self._hub = hub

    def logs(self, node: str, job_id: str) -> list[files.Log]:
        answer = self._hub.ask(node, {"do": "logs", "job_id": job_id})
        return [files.Log(process, first, end, 0.0) for process, first, end in answer.get("logs", ())]

    def read(self, node: str, process: str, at: int, limit: int) -> tuple[bytes, int]:
        answer = self._hub.ask(node, {"do": "read-log", "process": process, "at": at, "limit": limit})
        try:
            return base64.b64decode(answer.get("data", ""), validate=True), answer.get("next", at)
        except binascii.Error:
            raise UnreachableError(f"{node} does not send its log in order") from None


class FolderShelf:
    """In a folder of this machine, which is all nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def logs(self, node: str, job_id: str) -> list[files.Log]:
        return [log for log in files.logs_in(self._folder, f"{job_id}.") if _shown_as(log.process, node) is not None]

    def read(self, node: str, process: str, at: int, limit: int) -> tuple[bytes, int]:
        return files.read(self._folder, process, at, limit)


class JobLogs:
    """Safe from any thread; asks nodes, so never on the controller's loop."""

    def __init__(self, state: State, shelf: Shelf) -> None:
        self._state, self._shelf = state, shelf

    def page(self, job: Job, rank: int | None, tail: int | None, cursor: str | None) -> dict[str, Any]:
        """The next lines after `cursor`; without one the first, or the last `tail` of each process."""
        ended = job.state in ENDED  # read first: what it printed before is there when it has ended
        events = self._state.store.events(job_id=job.id, which=_PLACES)
        seen, plans = _positions(cursor), _plans(job, events)
        entries, missing, budget, more = [], [], PAGE_BYTES, False
        for node in _nodes(events):
            try:
                for log in self._shelf.logs(node, job.id):
                    shown_as, device = _shown_as(log.process, node), _device(log.process, node)
                    ranks = _ranks_of(log.process, device, plans) if device is not None else []
                    if shown_as is None or (rank is not None and rank not in ranks):
                        continue
                    at = max(seen.get(log.process, log.first), log.first)
                    text = ""
                    if cursor is None and tail is not None:
                        text, at = self._tail(node, log, tail)
                    elif log.end > at and budget > 0:
                        asked = min(_PIECE_BYTES, budget)
                        data, after = self._shelf.read(node, log.process, at, asked)
                        at = max(at, after - len(data))  # later, if its oldest part went meanwhile
                        whole = _whole_lines(data, ended and after >= log.end)
                        text, at = whole.decode(errors="replace"), at + len(whole)
                        budget -= len(data)
                        more |= len(data) == asked and at < log.end
                    elif log.end > at:
                        more = True
                    seen[log.process] = at
                    if text:
                        shown = ranks[-1] if ranks else None
                        entries.append({"process": log.process, "device": shown_as, "rank": shown, "text": text})
            except UnreachableError as error:
                missing.append({"node": node, "problem": str(error)})
        return {
            "entries": entries,
            "cursor": _cursor(seen),
            "more": more,
            "ended": ended and not more,
            "missing": missing,
        }

    def _tail(self, node: str, log: files.Log, lines: int) -> tuple[str, int]:
        length = min(log.end - log.first, PAGE_BYTES)
        data, after = self._shelf.read(node, log.process, log.end - length, length)
        kept = data.splitlines(keepends=True)[-lines:] if lines else []
        return b"".join(kept).decode(errors="replace"), after


def _plans(job: Job, events: Sequence[Event]) -> dict[int, Plan]:
    """By generation, oldest first."""
    shown = [event.data for event in events if event.kind in ("launched", "committed")]
    plans = {data["generation"]: Plan.from_dict(data["plan"]) for data in shown}
    if job.plan is not None:
        plans[job.generation] = job.plan
    return dict(sorted(plans.items()))


def _nodes(events: Sequence[Event]) -> list[str]:
    """Where the job was ever sent to."""
    devices = [text for event in events if event.kind == "decided" for text in event.data["devices"]]
    return list(dict.fromkeys(Device.parse(text).node for text in devices))


def _device(process: str, node: str) -> Device | None:
    """The device of a rank's process, if that is on `node`; a store has none."""
    try:
        device = ProcessName.parse(process).device
    except (ValueError, SpecError):
        return None
    return device if device is not None and device.node == node else None


def _shown_as(process: str, node: str) -> str | None:
    """What a process's lines are shown under, if it ran on `node`: a rank's device; what set the node up."""
    device = _device(process, node)
    if device is not None:
        return str(device)
    return f"{node} set-up" if setup.is_of(process) and process.split(".", 4)[4:] == [node] else None


def _ranks_of(process: str, device: Device, plans: dict[int, Plan]) -> list[int]:
    """Which ranks it was, oldest first: a process outlives layouts until another is forked on its device."""
    forked = int(process.split(".")[1])
    found: list[int] = []
    for generation, plan in plans.items():
        if generation >= forked:
            if device not in plan.devices:
                break  # it was let go
            found.append(plan.devices.index(device))
    return found


def _whole_lines(data: bytes, last: bool) -> bytes:
    """What of a piece may be shown: a line that is being written waits for its end, unless it is too long."""
    cut = data.rfind(b"\n") + 1
    return data if last or (not cut and len(data) >= _PIECE_BYTES) else data[:cut]


def _cursor(positions: dict[str, int]) -> str:
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(positions).encode())).decode()


def _positions(cursor: str | None) -> dict[str, int]:
    """Raises `SpecError` for what no page ever gave out."""
    if cursor is None:
        return {}
    found: Any = None
    try:
        inflated = zlib.decompressobj().decompress(base64.urlsafe_b64decode(cursor), _MOST_CURSOR_BYTES)
        found = json.loads(inflated)
    except (ValueError, zlib.error, RecursionError):
        pass
    good = isinstance(found, dict) and all(_is_position(value) for value in found.values())
    require(good, "cursor", cursor, "is not one that `logs` gave out", "leave it out to begin anew")
    return dict(found)


def _is_position(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
