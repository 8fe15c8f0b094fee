"""Accounts, their bearer tokens (hashed at rest) and tenants' quotas, in the controller's database.

A token is 32 random bytes, so that a plain SHA-256 of it is as good as any slow hash: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine, delete, insert, select

from suika.control import tables
from suika.control.auth import EVERYONE, Account, Role
from suika.core.errors import require
from suika.core.quota import Quota

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_PREFIX = "suika_"  # lets a leaked token be recognised for what it is


class Accounts:
    """Safe from any thread. `clock` gives seconds since the epoch. `fence` refuses, by raising in the transaction that
    would write, a controller that is not the present one; who works on the database by hand needs none."""

    def __init__(
        self,
        engine: Engine,
        clock: Callable[[], float] = time.time,
        fence: Callable[[Connection], None] = lambda connection: None,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._fence = fence

    @contextmanager
    def _writing(self) -> Iterator[Connection]:
        with self._engine.begin() as connection:
            self._fence(connection)
            yield connection

    def add(self, name: str, role: Role, tenant: str | None = None) -> Account:
        """A new account. Users and readers need a tenant; admins and operators act for all."""
        require(bool(_NAME.fullmatch(name)), "account.name", name, "must be 1-63 lower-case letters, digits or '-'")
        if role.sees_all:
            require(tenant is None, "account.tenant", tenant, f"a {role} acts for all tenants", "leave it out")
        else:
            good = tenant is not None and bool(_NAME.fullmatch(tenant))
            require(good, "account.tenant", tenant, f"a {role} needs one: 1-63 lower-case letters, digits or '-'")
        account = Account(name, role, tenant or EVERYONE)
        with self._writing() as connection:
            known = connection.execute(select(tables.accounts).where(tables.accounts.c.name == name)).first()
            require(known is None, "account.name", name, "exists already", "choose another")
            connection.execute(insert(tables.accounts).values(name=name, role=role.value, tenant=account.tenant))
        return account

    def remove(self, name: str) -> None:
        """The account and all its tokens; they are refused from the next request on."""
        with self._writing() as connection:
            connection.execute(delete(tables.tokens).where(tables.tokens.c.account == name))
            gone = connection.execute(delete(tables.accounts).where(tables.accounts.c.name == name)).rowcount
            require(gone == 1, "account", name, "there is no such account")

    def all(self) -> list[Account]:
        with self._engine.connect().execution_options(reads_only=True) as connection:
            rows = connection.execute(select(tables.accounts).order_by(tables.accounts.c.name)).all()
        return [Account(row.name, Role(row.role), row.tenant) for row in rows]

    def issue(self, account: str, lifetime_s: float | None = None) -> str:
        """A new token for `account`. It is shown this once: only its hash is kept."""
        require(lifetime_s is None or lifetime_s > 0, "token.lifetime_s", lifetime_s, "must be > 0")
        token, now = _PREFIX + secrets.token_urlsafe(32), self._clock()
        with self._writing() as connection:
            known = connection.execute(select(tables.accounts).where(tables.accounts.c.name == account)).first()
            require(known is not None, "account", account, "there is no such account")
            expires_s = None if lifetime_s is None else now + lifetime_s
            row = {"digest": _digest(token), "account": account, "created_s": now, "expires_s": expires_s}
            connection.execute(insert(tables.tokens).values(**row))
        return token

    def revoke(self, account: str) -> int:
        """Make all of an account's tokens void. Returns their number."""
        with self._writing() as connection:
            return connection.execute(delete(tables.tokens).where(tables.tokens.c.account == account)).rowcount

    def authenticate(self, token: str) -> Account | None:
        """Whose token this is; None if it is nobody's or has expired."""
        joined = select(tables.accounts, tables.tokens.c.expires_s).join(tables.tokens)
        with self._engine.connect().execution_options(reads_only=True) as connection:
            row = connection.execute(joined.where(tables.tokens.c.digest == _digest(token))).first()
        if row is None or (row.expires_s is not None and row.expires_s <= self._clock()):
            return None
        return Account(row.name, Role(row.role), row.tenant)

    # -- quotas -------------------------------------------------------------------------------------------------------

    def quotas(self) -> dict[str, Quota]:
        """By tenant; one without an entry is sure of nothing and has no limit."""
        with self._engine.connect().execution_options(reads_only=True) as connection:
            most = {row.tenant: row.devices for row in connection.execute(select(tables.quotas))}
            sure = {row.tenant: row for row in connection.execute(select(tables.guarantees))}
        return {
            tenant: Quota(sure[tenant].devices, sure[tenant].nodes, most.get(tenant))
            if tenant in sure
            else Quota(max=most[tenant])
            for tenant in sorted({*most, *sure})
        }

    def set_quota(self, tenant: str, quota: Quota) -> None:
        """For the tenant's running jobs together; `Quota()` takes its entry away."""
        require(bool(_NAME.fullmatch(tenant)), "quota.tenant", tenant, "must be 1-63 lower-case letters, digits or '-'")
        with self._writing() as connection:
            for table in (tables.quotas, tables.guarantees):
                connection.execute(delete(table).where(table.c.tenant == tenant))
            if quota.max is not None:
                connection.execute(insert(tables.quotas).values(tenant=tenant, devices=quota.max))
            if quota.guarantees:
                sure = {"tenant": tenant, "devices": quota.guarantee, "nodes": quota.guarantee_nodes}
                connection.execute(insert(tables.guarantees).values(sure))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
