"""The controller's door for the network: REST under /v1, over the calls of `Api`.

Every route names the right it needs; a job of another tenant does not exist for who may not see it. Changes run on the
controller's loop, as they do behind the Unix socket: both doors give the same answers.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Body, Depends, FastAPI, Header, Query, Request
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from suika.control import boundary
from suika.control.accounts import Accounts
from suika.control.api import Api
from suika.control.auth import Account, Right, Role
from suika.control.boundary import ForbiddenError, PlainJson, Refusal
from suika.control.joblogs import MOST_LINES
from suika.control.metrics import Backends, Metrics
from suika.control.store import Which
from suika.control.tenancy import TenantView
from suika.core.errors import require
from suika.core.job import JobSpec, JobState
from suika.core.quota import Quota

POLL_S = 0.25  # how late a followed event may be
RECHECK_S = 10.0  # how long a stream outlives the token that it was opened with
MOST_STANDING_S = 60.0  # a round of the controller's loop that lasts longer is no long decision
LOG_READERS = 8  # requests for logs, which wait for nodes, at a time: they keep no other requests waiting
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": Refusal} for code in (400, 401, 403, 404, 409, 413, 422, 503)
}
_MOMENT = "seconds since the epoch; below 0: so long ago by the controller's clock"
Text = Annotated[str, Field(max_length=200)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Resize(_Body):
    devices: Annotated[str | None, Field(max_length=40, description="N or MIN:MAX")] = None
    layout: Annotated[str | None, Field(max_length=200, description="tp=..,pp=..,dp=.. or auto")] = None
    dry_run: Annotated[bool, Field(description="change nothing, say what the move would cost")] = False


class Drain(_Body):
    undo: bool = False
    deadline_s: Annotated[float | None, Field(gt=0, le=1e9, allow_inf_nan=False)] = None


class NewAccount(_Body):
    name: Text
    role: Role
    tenant: Text | None = None


class NewToken(_Body):
    lifetime_s: Annotated[float | None, Field(gt=0, le=1e10, allow_inf_nan=False)] = None


class QuotaBody(_Body):
    """All left out: the tenant has no quota."""

    guarantee: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    guarantee_nodes: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max: Annotated[int | None, Field(ge=0, le=1_000_000)] = None


def make_app(api: Api, accounts: Accounts, data_roots: Sequence[Path] = (), backends: Backends = dict) -> FastAPI:
    """The ASGI app. `data_roots`: where jobs' data and final checkpoints may lie; none given: anywhere that the
    controller can read, which is for tests."""
    app = FastAPI(
        title="Suika",
        version="1",
        default_response_class=PlainJson,
        responses=REFUSALS,
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        openapi_url="/v1/openapi.json",
    )
    boundary.install(app)
    needs = _Authority(accounts).needs
    _jobs(app, api, needs, tuple(root.resolve() for root in data_roots))
    _cluster(app, api, accounts, needs, backends)
    _administration(app, api, accounts, needs)
    return app


class _Authority:
    """Turns a bearer token into an account, or refuses."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def needs(self, right: Right) -> Any:
        """A dependency: the account behind the request, which has `right`."""

        def check(
            bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))],
        ) -> Account:
            account = self._accounts.authenticate(bearer.credentials) if bearer is not None else None
            if account is None:
                raise HTTPException(401, "a valid token is needed", {"WWW-Authenticate": "Bearer"})
            if not account.may(right):
                raise ForbiddenError("role", account.role.value, f"may not {right}")
            return account

        return Depends(check)


def _jobs(app: FastAPI, api: Api, needs: Callable[[Right], Any], data_roots: tuple[Path, ...]) -> None:
    view, submit = needs(Right.VIEW), needs(Right.SUBMIT)
    schema = {"requestBody": {"required": True, "content": {"application/json": {"schema": _job_schema()}}}}

    @app.post("/v1/jobs", status_code=201, openapi_extra=schema)
    def submit_job(
        job: Annotated[dict[str, Any], Body()],
        dry_run: bool = False,
        idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
        who: Account = submit,
    ) -> dict[str, Any]:
        """Accept a job. The same key and body again is the same job; another body is a conflict (409)."""
        if not who.role.sees_all:
            job = {"tenant": who.tenant, **job}
            if job["tenant"] != who.tenant:
                raise ForbiddenError("job.tenant", job["tenant"], f"is not yours ({who.tenant})", "leave it out")
        _check_data("data", job.get("data"), data_roots)
        _check_data("final_checkpoint", job.get("final_checkpoint"), data_roots)
        key = None if idempotency_key is None else f"{who.name}/{idempotency_key}"
        return TenantView(api, who).shown(api.submit(job, request_id=key, dry_run=dry_run))

    @app.get("/v1/jobs")
    def list_jobs(
        all: bool = False,
        state: JobState | None = None,
        after: Annotated[str | None, Query(max_length=64, description="the id in the last page's `next`")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        who: Account = view,
    ) -> dict[str, Any]:
        """One page of jobs in order of submission; those that have ended too with `all` or their `state`."""
        seen = TenantView(api, who)
        page, further = seen.page(all, state, after, limit)
        return {"jobs": [seen.shown(api.row(job)) for job in page], "next": page[-1].id if further else None}

    @app.get("/v1/jobs/{job}")
    def describe_job(job: str, who: Account = view) -> dict[str, Any]:
        """All there is to know of a job, by its id or name."""
        seen = TenantView(api, who)
        return seen.shown(api.describe(seen.find(job).id))

    @app.get("/v1/jobs/{job}/explanation")
    def explain_job(job: str, who: Account = view) -> dict[str, Any]:
        """Why it has what it has, or why it waits."""
        seen = TenantView(api, who)
        return seen.explain(seen.find(job).id)

    readers = CapacityLimiter(LOG_READERS)

    @app.get("/v1/jobs/{job}/logs")
    async def job_logs(
        job: str,
        rank: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
        tail: Annotated[int | None, Query(ge=0, le=MOST_LINES, description="lines of each process")] = None,
        cursor: Annotated[str | None, Query(max_length=50_000, description="`cursor` of the last page")] = None,
        who: Account = view,
    ) -> dict[str, Any]:
        """What its processes printed, a page at a time, over moves and restarts; ask again with the page's cursor."""

        def read() -> dict[str, Any]:
            return api.logs(TenantView(api, who).find(job).id, rank, tail, cursor)

        return await run_sync(read, limiter=readers)

    @app.post("/v1/jobs/{job}/resize")
    def resize_job(job: str, wish: Resize, who: Account = submit) -> dict[str, Any]:
        """Ask for another range of devices or a fixed layout; of many wishes the last one counts."""
        seen = TenantView(api, who)
        return seen.shown(api.resize(seen.find(job).id, wish.devices, wish.layout, wish.dry_run))

    @app.post("/v1/jobs/{job}/cancel")
    def cancel_job(job: str, who: Account = submit) -> dict[str, Any]:
        """End it for good; asking again changes nothing."""
        seen = TenantView(api, who)
        found = seen.find(job)
        return seen.shown(api.row(found) if found.state is JobState.CANCELLED else api.cancel(found.id))


def _cluster(app: FastAPI, api: Api, accounts: Accounts, needs: Callable[[Right], Any], backends: Backends) -> None:
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


def _administration(app: FastAPI, api: Api, accounts: Accounts, needs: Callable[[Right], Any]) -> None:
    view, administer = needs(Right.VIEW), needs(Right.ADMINISTER)

    @app.get("/v1/accounts")
    def list_accounts(who: Account = administer) -> dict[str, Any]:
        return {"accounts": [_account(account) for account in accounts.all()]}

    @app.post("/v1/accounts", status_code=201)
    def add_account(new: NewAccount, who: Account = administer) -> dict[str, Any]:
        return _account(accounts.add(new.name, new.role, new.tenant))

    @app.delete("/v1/accounts/{account}")
    def remove_account(account: str, who: Account = administer) -> dict[str, Any]:
        require(account != who.name, "account", account, "is your own", "let another admin remove it")
        accounts.remove(account)
        return {"removed": account}

    @app.post("/v1/accounts/{account}/tokens", status_code=201)
    def issue_token(account: str, new: NewToken, who: Account = administer) -> dict[str, Any]:
        """A new token; it is shown this once."""
        return {"account": account, "token": accounts.issue(account, new.lifetime_s)}

    @app.delete("/v1/accounts/{account}/tokens")
    def revoke_tokens(account: str, who: Account = administer) -> dict[str, Any]:
        """All tokens of the account are void from now on."""
        return {"account": account, "revoked": accounts.revoke(account)}

    @app.get("/v1/quotas")
    def list_quotas(who: Account = view) -> dict[str, Any]:
        """What a tenant's jobs are guaranteed and hold at most together; no entry: nothing sure, no limit."""
        return {"quotas": {tenant: q.to_dict() for tenant, q in accounts.quotas().items() if who.sees(tenant)}}

    @app.put("/v1/quotas/{tenant}")
    def set_quota(tenant: str, quota: QuotaBody, who: Account = administer) -> dict[str, Any]:
        accounts.set_quota(tenant, Quota(**quota.model_dump()))
        api.controller.call(lambda: api.state.limit(accounts.quotas()))
        return {"tenant": tenant, **quota.model_dump()}


def _account(account: Account) -> dict[str, Any]:
    return {"name": account.name, "role": account.role, "tenant": account.tenant}


def _job_schema() -> dict[str, Any]:
    """JobSpec's JSON schema; its references lead to where it stands in the OpenAPI document."""
    here = "#/paths/~1v1~1jobs/post/requestBody/content/application~1json/schema"
    return JobSpec.model_json_schema(ref_template=here + "/$defs/{model}")


def _check_data(field: str, path: Any, roots: tuple[Path, ...]) -> None:
    """Raise unless what the controller will read or write lies below a permitted folder, links followed."""
    if not roots or not isinstance(path, str) or "\0" in path:
        return  # without roots everything is permitted; what is no path is refused later, with the reason
    real = Path(path).resolve()
    permitted = ", ".join(map(str, roots))
    require(
        any(real.is_relative_to(root) for root in roots),
        f"job.{field}",
        path,
        "is not where jobs that come over the network may read and write",
        f"use a path below {permitted}; the operator permits others with `suika serve --data-root DIR`",
    )
