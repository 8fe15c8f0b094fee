"""What administrators may ask over the network: accounts and their tokens, tenants' quotas."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field

from suika.control.accounts import Accounts
from suika.control.api import Api
from suika.control.auth import Account, Right, Role
from suika.control.boundary import Needs, StrictBody
from suika.core.errors import require
from suika.core.quota import Quota

Text = Annotated[str, Field(max_length=200)]


class NewAccount(StrictBody):
    name: Text
    role: Role
    tenant: Text | None = None


class NewToken(StrictBody):
    lifetime_s: Annotated[float | None, Field(gt=0, le=1e10, allow_inf_nan=False)] = None


class QuotaBody(StrictBody):
    """All left out: the tenant has no quota."""

    guarantee: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    guarantee_nodes: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    max: Annotated[int | None, Field(ge=0, le=1_000_000)] = None


def add(app: FastAPI, api: Api, accounts: Accounts, needs: Needs) -> None:
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
