"""The log of a durable class as Spark sees it: its events, without the rows and columns that only its shards need.

The bridge marks the columns as a log's. The tasks leave out all rows but events, so the bridge can send blocks as they are on disk.
This module needs nothing of `levada.actors.durable`, which workers never import.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute

from levada.framework.errors import ConfigurationError

__all__ = ["events_of", "is_log", "shown"]

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none

_MARK = b"levada.log"
_FIRST = ["entity", "sequence", "command", "time", "kind"]


def shown(log: pa.Schema) -> pa.Schema:
    """Return the columns of a log that Spark sees, marked as a log's; `ConfigurationError` if this is not the log of a durable class."""
    if log.names[: len(_FIRST)] != _FIRST:
        raise ConfigurationError(
            f"this journal is not the log of a durable class: it has the columns {', '.join(log.names)[:200]}"
        )
    return pa.schema([field for field in log if not field.name.startswith("_")], metadata={_MARK: b""})


def is_log(columns: pa.Schema) -> bool:
    """Whether `shown` made these columns."""
    return _MARK in (columns.metadata or {})


def events_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the events among the rows of a log, in the columns that Spark sees. Kinds that begin with ``$`` are the shard's own."""
    events = pc.invert(pc.starts_with(rows.column("kind"), "$"))
    return rows.select([name for name in rows.schema.names if not name.startswith("_")]).filter(events)
