"""What each tenant has used: a fold over the append-only events, so it is the same after any number of restarts.

A job holds the devices that were decided from its start until its processes have left them, and during a move those of
both layouts; a move that fails gives back what it had taken. What comes after its processes, the copy of its final
checkpoint, holds no device: others may have them by then. While it waits for devices, that is counted too. Devices that
a controller's outage finds running are in use all the while: nothing ends with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from suika.control.store import Event, Store
from suika.core.cluster import Device
from suika.core.errors import require

_EVENTS_AT_ONCE = 10_000
_ENDS = ("job-finished", "job-failed", "job-cancelled")
_LEAVES = ("job-queued", "job-recovering", "job-unsatisfiable", *_ENDS)
_UNKNOWN = "unknown"  # the type of a device whose node is not in the cluster any more
TypeOf = Callable[[str], str | None]  # of a node's devices; None: no such node


@dataclass
class _Span:
    """Devices held, or waited for, from `begin_s` to `end_s` (None: until now)."""

    begin_s: float
    devices: frozenset[str] = frozenset()
    waits: bool = False
    end_s: float | None = None

    def seconds(self, since_s: float, until_s: float) -> float:
        end_s = until_s if self.end_s is None else min(self.end_s, until_s)
        return max(end_s - max(self.begin_s, since_s), 0.0)


@dataclass
class _Account:
    """One job. `spans` follow each other without gaps, from its submission to its end."""

    job_id: str
    name: str
    tenant: str
    submitted_s: float
    spans: list[_Span]
    decided: frozenset[str] = frozenset()
    before_move: frozenset[str] = frozenset()
    moves: list[tuple[float, bool, int]] = field(default_factory=list)  # (when, committed, bytes)
    ended_s: float | None = None

    def hold(self, at_s: float, devices: Iterable[str], waits: bool = False) -> None:
        now, held = self.spans[-1], frozenset(devices)
        if now.end_s is None and (now.devices, now.waits) != (held, waits):
            now.end_s = at_s
            self.spans.append(_Span(at_s, held, waits))

    def leave(self, at_s: float, devices: Iterable[str]) -> None:
        """Its processes on these are gone."""
        now = self.spans[-1]
        if now.devices:
            self.hold(at_s, now.devices - frozenset(devices))

    def end(self, at_s: float) -> None:
        if self.ended_s is None:
            self.spans[-1].end_s = self.ended_s = at_s


class UsageBook:
    """Reads each event once. `report` is safe from any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._last_seq = 0
        self._accounts: dict[str, _Account] = {}

    def report(
        self,
        now_s: float,
        type_of: TypeOf,
        since_s: float | None = None,
        until_s: float | None = None,
        sees: Callable[[str], bool] = lambda tenant: True,
    ) -> dict[str, Any]:
        """Device-seconds, waiting and moves in the seconds from `since_s` to `until_s` (by default from the first job
        to `now_s`; below 0: so long before `now_s`), of the tenants that `sees` lets through: per tenant, and per job
        and device type."""
        with self._lock:
            self._read()
            accounts = [account for account in self._accounts.values() if sees(account.tenant)]
            first_s = min((account.submitted_s for account in accounts), default=now_s)
            begin_s = first_s if since_s is None else _moment(since_s, now_s)
            end_s = now_s if until_s is None else min(_moment(until_s, now_s), now_s)
            require(begin_s <= end_s, "usage.since", begin_s, f"is after the end of the time asked for ({end_s:.0f})")
            rows = [row for account in accounts for row in _rows(account, begin_s, end_s, type_of)]
        return {"since_s": begin_s, "until_s": end_s, "tenants": _by_tenant(rows), "jobs": rows}

    def _read(self) -> None:
        while events := self._store.events(self._last_seq, limit=_EVENTS_AT_ONCE):
            for event in events:
                self._fold(event)
            self._last_seq = events[-1].seq

    def _fold(self, event: Event) -> None:
        data, at_s = event.data, event.at_s
        if event.kind == "submitted" and event.job_id is not None:
            spec = data["spec"]
            waits = _Span(at_s, waits=True)
            self._accounts[event.job_id] = _Account(event.job_id, spec["name"], spec["tenant"], at_s, [waits])
        account = self._accounts.get(event.job_id or "")
        if account is None:
            return
        match event.kind:
            case "decided" if data["devices"]:
                account.decided = frozenset(data["devices"])
            case "job-starting":
                account.hold(at_s, account.decided)
            case "job-redeploying":
                account.before_move = account.spans[-1].devices
                account.hold(at_s, account.before_move | account.decided)
            case "committed":
                account.hold(at_s, data["plan"]["devices"])
            case "released":
                account.leave(at_s, data["devices"])
            case "redeployed":
                account.moves.append((at_s, True, data["moved_bytes"]))
            case "move-failed":
                account.moves.append((at_s, False, 0))
                account.hold(at_s, account.before_move)
            case kind if kind in _ENDS:
                account.end(at_s)
            case kind if kind in _LEAVES:
                account.hold(at_s, (), waits=True)


def _moment(said_s: float, now_s: float) -> float:
    return said_s if said_s >= 0 else now_s + said_s


def _rows(account: _Account, begin_s: float, end_s: float, type_of: TypeOf) -> list[dict[str, Any]]:
    """One per device type that the job held in that time; one without a type if it only waited."""
    held: dict[str, float] = {}
    waiting_s = 0.0
    for span in account.spans:
        seconds = span.seconds(begin_s, end_s)
        if not seconds:
            continue
        if span.waits:
            waiting_s += seconds
        for device in span.devices:
            kind = type_of(Device.parse(device).node) or _UNKNOWN
            held[kind] = held.get(kind, 0.0) + seconds
    moves = [(good, moved) for at_s, good, moved in account.moves if begin_s <= at_s < end_s]
    if not held and not waiting_s and not moves:
        return []
    shown = {"tenant": account.tenant, "job": account.job_id, "name": account.name}
    rest = {
        "waiting_s": waiting_s,
        "moves": sum(good for good, _ in moves),
        "failed_moves": sum(not good for good, _ in moves),
        "moved_bytes": sum(moved for _, moved in moves),
    }
    rows: list[dict[str, Any]] = [
        {**shown, "device_type": kind, "device_s": device_s} for kind, device_s in sorted(held.items())
    ] or [{**shown, "device_type": None, "device_s": 0.0}]
    nothing: dict[str, Any] = {"waiting_s": 0.0, "moves": 0, "failed_moves": 0, "moved_bytes": 0}
    return [row | (rest if index == 0 else nothing) for index, row in enumerate(rows)]  # each counts once


def _by_tenant(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    totals: dict[str, dict[str, Any]] = {}
    jobs: dict[str, set[str]] = {}
    for row in rows:
        tenant = row["tenant"]
        total = totals.setdefault(tenant, {"tenant": tenant, "device_s": 0.0, "device_s_by_type": {}, "jobs": 0})
        jobs.setdefault(tenant, set()).add(row["job"])
        total["jobs"] = len(jobs[tenant])
        total["device_s"] += row["device_s"]
        if row["device_type"] is not None:
            by_type = total["device_s_by_type"]
            by_type[row["device_type"]] = by_type.get(row["device_type"], 0.0) + row["device_s"]
        for name in ("waiting_s", "moves", "failed_moves", "moved_bytes"):
            total[name] = total.get(name, 0) + row[name]
    return [totals[tenant] for tenant in sorted(totals)]
