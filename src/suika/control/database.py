"""A `Store` that outlives its process: SQLAlchemy on SQLite (WAL) or PostgreSQL, by URL."""
