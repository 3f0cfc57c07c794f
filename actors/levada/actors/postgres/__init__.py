"""Logs of durable actors in PostgreSQL.

Needs the extra: ``pip install 'levada[postgres]'``.

Give `levada.actors.durable.shards` the URL of a database, ``journal="postgresql://user@host/database"``, or a `PostgresStore`.
"""

from __future__ import annotations

try:
    import psycopg as _psycopg  # noqa: F401 - only to say what is missing
except ImportError as missing:
    raise ModuleNotFoundError(
        "levada.actors.postgres needs psycopg: pip install 'levada[postgres]'", name="psycopg"
    ) from missing

from .errors import DatabaseAway
from .store import PostgresStore

__all__ = ["DatabaseAway", "PostgresStore"]
