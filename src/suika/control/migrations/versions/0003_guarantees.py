"""What tenants are guaranteed, beside the most that they may hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "guarantees",
        sa.Column("tenant", sa.String(63), primary_key=True),
        sa.Column("devices", sa.Integer, nullable=False),
        sa.Column("nodes", sa.Integer, nullable=False),
    )
