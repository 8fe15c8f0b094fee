"""The cluster as one account sees it: jobs, devices and events of its tenant, or of all."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from suika.control.api import Api, meant
from suika.control.auth import Account
from suika.control.store import EVERY, Which
from suika.core.errors import NotFoundError
from suika.core.job import ENDED, Job, JobState

_JOB_ID = re.compile(r"\bj[0-9a-f]{10}\b")
OF_OTHERS = "(another tenant's)"


class TenantView:
    """Read-only and cheap to make: one per request."""

    def __init__(self, api: Api, who: Account) -> None:
        self.api = api
        self.who = who

    def find(self, name: str) -> Job:
        """The job of this id or name: the active one, else the latest that ended. Raises `NotFoundError`, or
        `SpecError` for a name that several active jobs bear."""
        found = [head for head in self.api.state.store.named(name) if self.who.sees(head.tenant)]
        if not found:
            raise NotFoundError("job", name, "there is no such job")
        return self.api.state.store.job(meant(found, name).id)

    def page(self, all: bool, state: JobState | None, after: str | None, limit: int) -> tuple[list[Job], bool]:
        """At most `limit` jobs after the one with id `after`, and whether there are more."""
        store = self.api.state.store
        heads, start = store.heads(), 0
        if after is not None:
            last = self.find(after)
            start = bisect_right(heads, (last.submitted_s, last.id), key=lambda head: (head.submitted_s, head.id))
        page: list[Job] = []
        for head in heads[start:]:
            wanted = head.state is state if state is not None else all or head.state not in ENDED
            if wanted and self.who.sees(head.tenant):
                if len(page) == limit:
                    return page, True
                page.append(store.job(head.id))
        return page, False

    def nodes(self) -> list[dict[str, Any]]:
        rows = self.api.nodes(self._name)
        for row in rows:
            if row["drain"] is not None:
                row["drain"]["left"] = [left for left in row["drain"]["left"] if self._sees_id(left["job_id"])]
        return rows

    def explain(self, job_id: str) -> dict[str, Any]:
        return self.shown(self.api.explain(job_id, self._name))

    def shown(self, document: Any) -> Any:
        """`document` without a word of which jobs others have: sentences name jobs by their ids."""
        if self.who.role.sees_all:
            return document
        if isinstance(document, str):
            return _JOB_ID.sub(lambda found: found[0] if self._sees_id(found[0]) else OF_OTHERS, document)
        if isinstance(document, Mapping):
            return {self.shown(key): self.shown(value) for key, value in document.items()}
        if isinstance(document, (list, tuple)):
            return [self.shown(item) for item in document]
        return document

    def _name(self, job: Job) -> str:
        return job.spec.name if self._sees(job) else OF_OTHERS

    def _sees_id(self, job_id: str) -> bool:
        """An id that no job bears gives nothing away."""
        try:
            return self._sees(self.api.state.store.job(job_id))
        except KeyError:
            return True

    def events(self, after: int, job: str | None, limit: int, which: Which = EVERY) -> tuple[list[dict[str, Any]], int]:
        """At most `limit` events that the account may see, and the number to go on after."""
        store = self.api.state.store
        job_id = self.find(job).id if job is not None else None
        if not self.who.role.sees_all:
            which = replace(which, tenant=self.who.tenant)
        last_seq = store.last_seq()
        events = store.events(after, job_id, limit, which)
        there_may_be_more = len(events) == limit and not which.last
        go_on = events[-1].seq if there_may_be_more else max(after, last_seq, *(e.seq for e in events[-1:]))
        return [self.shown(event.to_dict()) for event in events], go_on

    def _sees(self, job: Job) -> bool:
        return self.who.sees(job.spec.tenant)
