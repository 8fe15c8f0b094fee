"""What the network may ask about the cluster: nodes and drains, events, a page or a stream of them, usage, health."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import FastAPI, Header, Query, Request
from fastapi.responses import PlainTextResponse
from pydantic import Field
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool

from suika.control import boundary
from suika.control.accounts import Accounts
from suika.control.api import Api
from suika.control.auth import Account, Right
from suika.control.boundary import Needs, PlainJson, StrictBody
from suika.control.metrics import Backends, Metrics
from suika.control.store import Which
from suika.control.tenancy import TenantView

POLL_S = 0.25  # how late a followed event may be
RECHECK_S = 10.0  # how long a stream outlives the token that it was opened with
MOST_STANDING_S = 60.0  # a round of the controller's loop that lasts longer is no long decision
_MOMENT = "seconds since the epoch; below 0: so long ago by the controller's clock"


class Drain(StrictBody):
    undo: bool = False
    deadline_s: Annotated[float | None, Field(gt=0, le=1e9, allow_inf_nan=False)] = None


def add(app: FastAPI, api: Api, accounts: Accounts, needs: Needs, backends: Backends) -> None:
    view, operate = needs(Right.VIEW), needs(Right.OPERATE)
    metrics = Metrics(api, backends)

    @app.get("/v1/nodes")
    def list_nodes(who: Account = view) -> dict[str, Any]:
        """Nodes, and who holds their devices."""
        return {"nodes": TenantView(api, who).nodes()}

    @app.post("/v1/nodes/{node}/drain")
    def drain_node(node: str, wish: Drain, who: Account = operate) -> dict[str, Any]:
        """Move jobs off the node, before a deadline if one is given, and give it no new work, until `undo`."""
        return api.drain(node, wish.undo, wish.deadline_s)

    @app.get("/v1/events")
    def list_events(
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        job: Annotated[str | None, Query(max_length=64)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
        before: Annotated[int | None, Query(ge=0, lt=2**63, description="only events below this number")] = None,
        since: Annotated[float | None, Query(gt=-(2**53), lt=2**53, description=_MOMENT)] = None,
        newest: Annotated[bool, Query(description="the last events of those asked for, not the first")] = False,
        who: Account = view,
    ) -> dict[str, Any]:
        """What happened, oldest first. `next` is the `after` of the next page; with `newest` the first event's number
        is the `before` of the page before it."""
        which = Which(before=before, since_s=api.moment(since), last=newest)
        rows, last = TenantView(api, who).events(after, job, limit, which)
        return {"events": rows, "next": last}

    @app.get("/v1/usage")
    def report_usage(
        since: Annotated[float | None, Query(gt=-(2**53), lt=2**53, description=_MOMENT)] = None,
        until: Annotated[float | None, Query(gt=-(2**53), lt=2**53, description=_MOMENT)] = None,
        tenant: Annotated[str | None, Query(max_length=64)] = None,
        who: Account = view,
    ) -> dict[str, Any]:
        """Device time, waiting and moves in that time, by tenant and by job and device type."""
        return api.usage_seen_by(who.sees, since, until, tenant)

    @app.get("/v1/events/stream", response_class=EventSourceResponse)
    async def follow_events(
        request: Request,
        after: Annotated[int, Query(ge=0, lt=2**63)] = 0,
        job: Annotated[str | None, Query(max_length=64)] = None,
        last_event_id: Annotated[int | None, Header(ge=0, lt=2**63)] = None,
        who: Account = view,
    ) -> EventSourceResponse:
        """Server-sent events from `after` (or Last-Event-ID) on, as they happen."""
        seen = TenantView(api, who)
        if job is not None:
            seen.find(job)  # what does not exist is refused before the stream begins

        async def follow() -> AsyncIterator[dict[str, Any]]:
            last, looked_s = after if last_event_id is None else last_event_id, time.monotonic()
            token = request.headers["authorization"].partition(" ")[2]
            while not await request.is_disconnected():
                if time.monotonic() - looked_s > RECHECK_S:
                    looked_s = time.monotonic()
                    if await run_in_threadpool(accounts.authenticate, token) != who:
                        return  # revoked, expired, or another's by now
                rows, last = await run_in_threadpool(seen.events, last, job, 1000)
                for row in rows:
                    yield {"id": str(row["seq"]), "event": row["kind"], "data": json.dumps(boundary.finite(row))}
                await asyncio.sleep(POLL_S)

        return EventSourceResponse(follow())

    @app.get("/metrics", response_class=PlainTextResponse)
    def show_metrics(who: Account = operate) -> PlainTextResponse:
        """Prometheus text."""
        return PlainTextResponse(metrics.text(), media_type=metrics.media_type)

    @app.get("/healthz")
    async def health() -> PlainJson:
        """200 as long as the controller's loop turns, else 503; needs no token, and waits for nothing."""
        stands_s = api.controller.stands_s
        if stands_s > MOST_STANDING_S:
            problem = f"the controller's loop has not gone round for {stands_s:.0f} s"
            return boundary.refusal(503, "controller", None, problem, "its log may say why")
        return PlainJson({"ok": True, "stands_s": round(stands_s, 3)})
