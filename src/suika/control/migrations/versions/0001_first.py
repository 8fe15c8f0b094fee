"""The first tables: controller's term, jobs, snapshots, events, nodes, accounts, tokens, quotas."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "controller",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("term", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("tenant", sa.String(63), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("submitted_s", sa.Float, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("steps_done", sa.BigInteger, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
    )
    seq = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "events",
        sa.Column("seq", seq, primary_key=True, autoincrement=False),
        sa.Column("at_s", sa.Float, nullable=False),
        sa.Column("kind", sa.String(63), nullable=False),
        sa.Column("job_id", sa.String(64)),
        sa.Column("data", sa.Text, nullable=False),
    )
    op.create_index("ix_events_job_id_seq", "events", ["job_id", "seq"])
    op.create_table("draining", sa.Column("node", sa.String(63), primary_key=True))
    op.create_table(
        "nodes",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "accounts",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(63), nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("digest", sa.String(64), primary_key=True),
        sa.Column("account", sa.String(63), sa.ForeignKey("accounts.name"), nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
        sa.Column("expires_s", sa.Float),
    )
    op.create_index("ix_tokens_account", "tokens", ["account"])
    op.create_table(
        "quotas",
        sa.Column("tenant", sa.String(63), primary_key=True),
        sa.Column("devices", sa.Integer, nullable=False),
    )
