"""What the network may ask about jobs: submit, list, describe, explain, read logs, resize, cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Body, FastAPI, Header, Query
from pydantic import Field

from suika.control.api import Api
from suika.control.auth import Account, Right
from suika.control.boundary import ForbiddenError, Needs, StrictBody
from suika.control.joblogs import MOST_LINES
from suika.control.tenancy import TenantView
from suika.core.errors import require
from suika.core.job import JobSpec, JobState

LOG_READERS = 8  # requests for logs, which wait for nodes, at a time: they keep no other requests waiting


class Resize(StrictBody):
    devices: Annotated[str | None, Field(max_length=40, description="N or MIN:MAX")] = None
    layout: Annotated[str | None, Field(max_length=200, description="tp=..,pp=..,dp=.. or auto")] = None
    dry_run: Annotated[bool, Field(description="change nothing, say what the move would cost")] = False


def add(app: FastAPI, api: Api, needs: Needs, data_roots: tuple[Path, ...]) -> None:
    """`data_roots`: see `rest.make_app`."""
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
        return {"jobs": [seen.shown(api.reports.row(job)) for job in page], "next": page[-1].id if further else None}

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
        return seen.shown(api.reports.row(found) if found.state is JobState.CANCELLED else api.cancel(found.id))


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
