"""Nodes that are being emptied, some of them by a deadline. The scheduler moves their jobs away; here is watched that
it happens in time, and said what could not be moved.

What must survive a restart is the event that began a drain. As long as there is room elsewhere jobs leave live, at
once. Shortly before the deadline those that are still there are stopped with their state saved (a command: with its
signal and grace), unless their users forbid it. After the deadline nothing is forced: it is told what is left and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from suika.control.observe import drop
from suika.control.state import State
from suika.control.store import Which
from suika.core.decision import Reason, ReasonCode
from suika.core.job import Job, JobState

SAVE_S = 60.0  # a training job is given this long to save its state, or half of the drain's time if that is less
MARGIN_S = 5.0  # for the end of processes
_OF_DRAINS = Which(frozenset(("node-draining", "node-drained", "drain-late")))
Stop = Callable[[Job, Reason, float], None]  # job, why, seconds until its devices are needed


@dataclass
class Drain:
    """`until_s`: the deadline; None: there is none."""

    node: str
    since_s: float
    until_s: float | None
    told: bool = False  # that it is empty, or late


class Drains:
    """Used on the controller's loop; `row` from any thread."""

    def __init__(self, state: State, stop: Stop) -> None:
        self._state, self._stop = state, stop
        self._drains = self._on_record(state.store.draining())

    def begin(self, node: str, deadline_s: float | None) -> None:
        """Also another deadline for a drain that is going on."""
        now, state = self._state.clock(), self._state
        until_s = now + deadline_s if deadline_s is not None else None
        with state.store.together():
            state.store.set_draining(state.store.draining() | {node})
            state.log("node-draining", node=node, until_s=until_s)
        self._drains[node] = Drain(node, now, until_s)
        state.changed = True

    def end(self, node: str) -> None:
        """The node may have work again."""
        with self._state.store.together():
            self._state.store.set_draining(self._state.store.draining() - {node})
            self._state.log("node-returned", node=node)
        self._drains.pop(node, None)
        self._state.changed = True

    def look(self) -> None:
        """Once per round of the loop: who must be stopped now, what is done, what is late."""
        now = self._state.clock()
        for drain in self._drains.values():
            left = self._left(drain.node)
            if drain.told and not left:
                continue
            if not left:
                drain.told = True
                self._state.log("node-drained", node=drain.node, taken_s=now - drain.since_s)
            elif drain.until_s is not None:
                self._hurry(drain, left, drain.until_s, now)

    def _hurry(self, drain: Drain, left: list[Job], until_s: float, now: float) -> None:
        for job in left:
            grace_s = job.spec.preemption.grace_s if job.spec.rigid else min(SAVE_S, (until_s - drain.since_s) / 2)
            up = job.state in (JobState.RUNNING, JobState.STARTING) and self._state.watch(job.id).run is not None
            if up and job.spec.stoppable and now >= until_s - grace_s - MARGIN_S:
                for waiting in [w for w in self._state.waiting if w.decision.job_id == job.id]:
                    drop(self._state, waiting, f"{drain.node} must be empty soon")
                reason = Reason(ReasonCode.DRAIN, f"{drain.node} must be empty soon and there is no room elsewhere")
                self._stop(job, reason, max(until_s - now - MARGIN_S, MARGIN_S))
        if now > until_s and not drain.told:
            drain.told = True
            why = [{"job_id": job.id, "why": _why_left(job)} for job in left]
            self._state.log("drain-late", node=drain.node, left=why)

    def _left(self, node: str) -> list[Job]:
        """Jobs with processes, or devices, on the node."""
        watches = list(self._state.watches.items())
        held = [job_id for job_id, watch in watches if any(device.node == node for device in watch.held)]
        return [self._state.store.job(job_id) for job_id in held]

    def row(self, node: str) -> dict[str, Any] | None:
        """What there is to say of the node's drain; None: it is not being drained."""
        drain = self._drains.get(node)
        if drain is None:
            return None
        left = self._left(node)
        late = drain.until_s is not None and bool(left) and self._state.clock() > drain.until_s
        told = [{"job_id": job.id, "name": job.spec.name, "why": _why_left(job)} for job in left]
        state = "late" if late else "draining" if left else "drained"
        return {"state": state, "since_s": drain.since_s, "until_s": drain.until_s, "left": told}

    def _on_record(self, nodes: frozenset[str]) -> dict[str, Drain]:
        """As they were begun last: one pass over the events for all of them, and none if there are none."""
        found = {node: Drain(node, self._state.clock(), None) for node in sorted(nodes)}
        after = 0
        while nodes and (page := self._state.store.events(after, None, 10_000, _OF_DRAINS)):
            after = page[-1].seq
            for event in page:
                node = event.data.get("node")
                if node not in found:
                    continue
                if event.kind == "node-draining":
                    found[node] = Drain(node, event.at_s, event.data.get("until_s"))
                else:
                    found[node].told = True
        return found


def _why_left(job: Job) -> str:
    if not job.spec.stoppable:
        return "its user does not let it be stopped" + ("" if job.spec.rigid else ", and there is no room elsewhere")
    sentences = {
        JobState.RUNNING: "the scheduler has found no room elsewhere yet",
        JobState.REDEPLOYING: "it is being moved",
        JobState.PREEMPTING: "it is being stopped",
        JobState.STARTING: "it is coming up",
    }
    return sentences.get(job.state, "its processes are ending")
