"""Who may do what: roles, rights and tenants. Pure rules; no tokens, no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

EVERYONE = "*"  # the tenant of accounts that act for all


class Right(StrEnum):
    VIEW = "view"  # jobs, nodes, events
    SUBMIT = "submit"  # submit, resize, cancel
    OPERATE = "operate"  # drain nodes, read the metrics
    ADMINISTER = "administer"  # accounts, tokens, quotas
    SERVE = "serve"  # be a node agent


class Role(StrEnum):
    ADMIN = "admin"
    OPERATOR = "operator"
    USER = "user"
    READ = "read"
    NODE = "node"

    @property
    def sees_all(self) -> bool:
        """Acts for every tenant."""
        return self in (Role.ADMIN, Role.OPERATOR, Role.NODE)


RIGHTS: dict[Role, frozenset[Right]] = {
    Role.ADMIN: frozenset({Right.VIEW, Right.SUBMIT, Right.OPERATE, Right.ADMINISTER}),
    Role.OPERATOR: frozenset({Right.VIEW, Right.SUBMIT, Right.OPERATE}),
    Role.USER: frozenset({Right.VIEW, Right.SUBMIT}),
    Role.READ: frozenset({Right.VIEW}),
    Role.NODE: frozenset({Right.SERVE}),
}


@dataclass(frozen=True)
class Account:
    name: str
    role: Role
    tenant: str  # `EVERYONE`, or the one whose jobs it sees

    def may(self, right: Right) -> bool:
        return right in RIGHTS[self.role]

    def sees(self, tenant: str) -> bool:
        """Whether jobs of `tenant` exist for this account."""
        return self.tenant in (EVERYONE, tenant)
