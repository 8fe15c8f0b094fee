"""Jobs on their way in: checked, given an id that a retry finds again, and put on record."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from suika.control.controller import Controller
from suika.control.reports import Reports, option_row
from suika.control.store import News
from suika.control.submit import admit
from suika.core.errors import ConflictError
from suika.core.job import ENDED, Job


class Submissions:
    """Of one controller; from any thread, side by side."""

    def __init__(self, controller: Controller, reports: Reports) -> None:
        self._controller, self._reports = controller, reports
        self._state = controller.state
        self._free = threading.Condition()  # of `_taken`: ids and names of jobs that are being accepted
        self._taken: set[str] = set()

    def submit(self, job: Any, request_id: str | None = None, dry_run: bool = False) -> dict[str, Any]:
        """Accept a job file, parsed. The same `request_id` and body again is the same job; another body is refused."""
        job_id = _job_id(request_id or secrets.token_hex(16))
        known = self._known(job_id, job)
        if known is not None:
            return known
        spec = admit(job, self._state.cluster, self._controller.pricing.curve)
        if dry_run:
            options = [option_row(option) for option in self._controller.pricing.curve(spec).options]
            return {"dry_run": True, "spec": spec.model_dump(mode="json"), "options": options}
        with self._accepting(job_id, f"{spec.tenant}/{spec.name}"):  # not on the loop, which may be deciding
            known = self._known(job_id, job)
            if known is not None:
                return known
            same = [h for h in self._state.store.named(spec.name) if (h.name, h.tenant) == (spec.name, spec.tenant)]
            if any(head.state not in ENDED for head in same):
                raise ConflictError("job.name", spec.name, "a job of this name is still active", "choose another")
            made = Job(job_id, spec, self._state.clock())
            data = {"spec": spec.model_dump(mode="json"), "body": _digest(job)}
            self._state.store.add(made, News(made.submitted_s, "submitted", data))
        self._controller.post(self._state.look_again)
        return self._reports.row(made)

    @contextmanager
    def _accepting(self, *names: str) -> Iterator[None]:
        """Only one submission of an id or a name at a time; others go into the store side by side."""
        with self._free:
            self._free.wait_for(lambda: self._taken.isdisjoint(names))
            self._taken.update(names)
        try:
            yield
        finally:
            with self._free:
                self._taken.difference_update(names)
                self._free.notify_all()

    def _known(self, job_id: str, body: Any) -> dict[str, Any] | None:
        try:
            self._state.store.job(job_id)
        except KeyError:
            return None
        (first,) = self._state.store.events(job_id=job_id, limit=1)
        if first.data["body"] != _digest(body):
            raise ConflictError("request_id", job_id, "was used for another job", "use a new one")
        return self._reports.row(self._state.store.job(job_id))


def _job_id(request_id: str) -> str:
    """A function of the request alone: a retry names the same job."""
    return "j" + hashlib.sha256(request_id.encode()).hexdigest()[:10]


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
