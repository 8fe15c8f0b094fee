"""A job at one instant of a simulation: what was decided about it and why, and what would change it."""

from __future__ import annotations

from typing import Any

from suika.core.decision import Reason, ReasonCode
from suika.core.errors import NotFoundError, SpecError
from suika.core.policy import Policy
from suika.core.words import seconds
from suika.schedule.cycle import CycleResult
from suika.schedule.explain import explain
from suika.simulate.engine import Engine
from suika.simulate.world import World


def explained(world: World, policy: Policy, job_id: str, at_s: float) -> dict[str, Any]:
    """The same document as of a live job, times in seconds from the first submission. Raises `SpecError` for a job that
    is not in the system at `at_s`."""
    log = _Log(job_id)
    engine = Engine(world, policy, on_cycle=log)
    state = engine.state
    if job_id not in state.number_of:
        some = ", ".join(job.id for job in world.jobs[:5])
        raise NotFoundError("explain", job_id, "is no job of this trace", f"it has {some}, ...")
    engine.run_until(at_s)
    record = state.outcome.records[state.number_of[job_id]]
    if record.job.submit_s > at_s:
        raise SpecError("explain", job_id, f"comes at {record.job.submit_s:g} s only", "ask about a later time")
    if record.end_s is not None:
        raise SpecError("explain", job_id, f"has ended by {at_s:g} s", f"it ran until {record.end_s:g} s")
    snapshot = state.snapshot()
    view = snapshot.job_of[job_id]
    reason = log.reason or Reason(ReasonCode.QUEUED, "nobody has decided about it yet")
    sentence = reason.sentence
    if view.moving_until_s is not None:
        sentence += f"; a move is in flight for {seconds(view.moving_until_s - at_s)} more"
    return {
        "id": job_id,
        "name": job_id,
        "policy": policy.name,
        "at_s": at_s,
        "state": view.state,
        "layout": view.layout.to_dict() if view.layout is not None else None,
        "devices": [str(device) for device in view.devices],
        "steps_done": view.done_steps,
        "steps": record.job.num_steps,
        "reason": {"code": reason.code, "sentence": sentence},
        "history": log.history,
        **explain(snapshot, policy, job_id),
    }


class _Log:
    """What cycles said about one job."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.reason: Reason | None = None
        self.history: list[dict[str, Any]] = []

    def __call__(self, result: CycleResult) -> None:
        decision = next((d for d in result.decisions if d.job_id == self.job_id), None)
        if decision is not None:
            self._note(result.snapshot.now_s, decision.reason, "decided", {
                "action": decision.action,
                "layout": decision.layout.to_dict() if decision.layout is not None else None,
                "devices": [str(device) for device in decision.devices],
            })  # fmt: skip
        elif self.job_id in result.snapshot.job_of and (waits := result.waits.get(self.job_id)) is not None:
            if self.history and self.history[-1]["kind"] == "waits":  # one entry while it waits, with the last reason
                self.history[-1]["data"] |= {"reason": waits.code, "sentence": waits.sentence}
                self.reason = waits
            else:
                self._note(result.snapshot.now_s, waits, "waits", {})

    def _note(self, at_s: float, reason: Reason, kind: str, data: dict[str, Any]) -> None:
        self.reason = reason
        said = {"reason": reason.code, "sentence": reason.sentence}
        self.history.append({"at_s": at_s, "kind": kind, "data": {**data, **said}})
