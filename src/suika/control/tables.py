"""The durable store's tables. A change here comes with a migration in `migrations/versions`.

Only what decides something has a column of its own; the rest of a record is JSON text, so that a new field of a job
needs no migration.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, String, Table, Text

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)

# One row. Whoever raised `term` last is the controller; writes of all others are refused.
controller = Table(
    "controller",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("term", BigInteger, nullable=False),
)

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(63), nullable=False),
    Column("name", String(63), nullable=False),
    Column("state", String(16), nullable=False),
    Column("submitted_s", Float, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("steps_done", BigInteger, nullable=False),
    Column("spec", Text, nullable=False),
    Column("record", Text, nullable=False),
)

# The newest complete snapshot of each job: what a replacement starts from.
snapshots = Table(
    "snapshots",
    metadata,
    Column("job_id", String(64), ForeignKey("jobs.id"), primary_key=True),
    Column("generation", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("path", Text, nullable=False),
)

# What each job has taught the estimator about a device type; `seq` orders them by their last change.
calibrations = Table(
    "calibrations",
    metadata,
    Column("job_id", String(64), ForeignKey("jobs.id"), primary_key=True),
    Column("device_type", String(63), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("record", Text, nullable=False),
)

# Append-only. `seq` grows by one without gaps.
events = Table(
    "events",
    metadata,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("at_s", Float, nullable=False),
    Column("kind", String(63), nullable=False),
    Column("job_id", String(64)),
    Column("data", Text, nullable=False),
    Index(None, "job_id", "seq"),
)

draining = Table("draining", metadata, Column("node", String(63), primary_key=True))

# Nodes that ever joined: a restarted controller waits for them.
nodes = Table("nodes", metadata, Column("name", String(63), primary_key=True), Column("record", Text, nullable=False))

accounts = Table(
    "accounts",
    metadata,
    Column("name", String(63), primary_key=True),
    Column("role", String(16), nullable=False),
    Column("tenant", String(63), nullable=False),
)

# A token itself is never stored: only its SHA-256.
tokens = Table(
    "tokens",
    metadata,
    Column("digest", String(64), primary_key=True),
    Column("account", String(63), ForeignKey("accounts.name"), nullable=False),
    Column("created_s", Float, nullable=False),
    Column("expires_s", Float),
    Index(None, "account"),
)

# What a tenant may hold at most, and what it is sure of; without a row: no limit, nothing sure.
quotas = Table(
    "quotas", metadata, Column("tenant", String(63), primary_key=True), Column("devices", Integer, nullable=False)
)

guarantees = Table(
    "guarantees",
    metadata,
    Column("tenant", String(63), primary_key=True),
    Column("devices", Integer, nullable=False),
    Column("nodes", Integer, nullable=False),
)
