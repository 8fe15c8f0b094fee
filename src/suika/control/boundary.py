"""What stands between HTTP and our calls: errors as documents, plain JSON, a limit on a request's size."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from suika.control.auth import Right
from suika.control.store import StoreAwayError
from suika.core.errors import ConflictError, NotFoundError, SpecError

MAX_BODY_BYTES = 1 << 20
Needs = Callable[[Right], Any]  # makes a route's dependency: the account behind the request, which has that right


class Problem(BaseModel):
    """A refusal: which field, what is wrong with it, and what would help."""

    field: str
    value: Any = None
    problem: str
    fix: str = ""


class Refusal(BaseModel):
    error: Problem


class StrictBody(BaseModel):
    """What a request may say; anything else in it is refused."""

    model_config = ConfigDict(extra="forbid")


class ForbiddenError(SpecError):
    """The account's role does not allow it, or the tenant is not its own."""


class PlainJson(JSONResponse):
    """ASCII JSON without NaN: any string a user sends can be sent back, lone surrogates too."""

    def render(self, content: Any) -> bytes:
        return json.dumps(finite(content), allow_nan=False, separators=(",", ":")).encode("ascii")


def finite(value: Any) -> Any:
    """`value` with every NaN or infinity as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def refusal(status: int, field: str, value: object, problem: str, fix: str = "", **headers: str) -> PlainJson:
    shown = value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)
    if isinstance(shown, str) and len(shown) > 200:
        shown = shown[:197] + "..."
    if isinstance(shown, int) and not isinstance(shown, bool) and abs(shown) >= 1 << 63:
        shown = "a number of 64 bits or more"
    content = {"error": {"field": field, "value": shown, "problem": problem, "fix": fix}}
    return PlainJson(content, status, headers={name.replace("_", "-"): text for name, text in headers.items()})


def install(app: FastAPI) -> None:
    """The documents that errors become, and the size limit."""

    def user_error(_: Request, error: Exception) -> PlainJson:
        assert isinstance(error, SpecError)
        kinds = {NotFoundError: 404, ConflictError: 409, ForbiddenError: 403}
        status = next((code for kind, code in kinds.items() if isinstance(error, kind)), 422)
        return refusal(status, error.field, error.value, error.problem, error.fix)

    def malformed(_: Request, error: Exception) -> PlainJson:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return refusal(422, ".".join(map(str, first["loc"])), first.get("input"), first["msg"])

    def http_error(_: Request, error: Exception) -> PlainJson:
        assert isinstance(error, HTTPException)
        return refusal(error.status_code, "request", None, str(error.detail), **dict(error.headers or {}))

    def overloaded(_: Request, __: Exception) -> PlainJson:
        problem = "the controller did not take the request up in time; it may still be carried out"
        return refusal(503, "request", None, problem, "ask again with the same Idempotency-Key", Retry_After="5")

    def away(_: Request, error: Exception) -> PlainJson:
        said = str(error.orig) if isinstance(error, OperationalError) else str(error)
        fix = "ask again with the same Idempotency-Key; the controller's log says more"
        return refusal(503, "store", None, f"it cannot be reached or written now: {said}", fix, Retry_After="30")

    def fault(request: Request, error: Exception) -> PlainJson:
        traceback.print_exception(error, file=sys.stderr)
        return PlainJson(
            {"fault": f"{type(error).__name__} in {request.url.path}; the controller's log says more"}, 500
        )

    app.add_exception_handler(SpecError, user_error)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(TimeoutError, overloaded)
    app.add_exception_handler(StoreAwayError, away)
    app.add_exception_handler(OperationalError, away)
    app.add_exception_handler(Exception, fault)
    app.add_middleware(SizeLimit)


class SizeLimit:
    """Refuses a request whose body is longer than `MAX_BODY_BYTES`, whatever its headers say."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > MAX_BODY_BYTES:
                problem = f"is longer than {MAX_BODY_BYTES} bytes"
                await refusal(413, "body", None, problem, Connection="close")(scope, receive, send)
                return
        whole = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> Message:
            return next(whole, None) or await receive()

        await self.app(scope, replay, send)
