"""What each job has taught the estimator."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "calibrations",
        sa.Column("job_id", sa.String(64), sa.ForeignKey("jobs.id"), primary_key=True),
        sa.Column("device_type", sa.String(63), primary_key=True),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
