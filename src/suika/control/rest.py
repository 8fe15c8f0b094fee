"""The controller's door for the network: REST under /v1, over the calls of `Api`.

Every route names the right it needs; a job of another tenant does not exist for who may not see it. Changes run on the
controller's loop, as they do behind the Unix socket: both doors give the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException

from suika.control import account_routes, boundary, cluster_routes, job_routes
from suika.control.accounts import Accounts
from suika.control.api import Api
from suika.control.auth import Account, Right
from suika.control.boundary import ForbiddenError, PlainJson, Refusal
from suika.control.metrics import Backends

REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": Refusal} for code in (400, 401, 403, 404, 409, 413, 422, 503)
}


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
    job_routes.add(app, api, needs, tuple(root.resolve() for root in data_roots))
    cluster_routes.add(app, api, accounts, needs, backends)
    account_routes.add(app, api, accounts, needs)
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
