"""The events in the log of a durable class, without the rows and columns that only its shards need.

This module needs nothing of `levada.actors.durable`: neither Spark's workers nor an export import that.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute

from levada.framework.errors import ConfigurationError

__all__ = ["event_columns", "events_of", "is_log"]

pc: Any = pyarrow.compute  # its functions are made when it is imported, so type checkers see none

_FIRST = ["entity", "sequence", "command", "time", "kind"]


def is_log(columns: pa.Schema) -> bool:
    """Whether a journal with these columns is the log of a durable class."""
    return bool(columns.names[: len(_FIRST)] == _FIRST)


def event_columns(log: pa.Schema, where: str = "this journal") -> pa.Schema:
    """Return the columns of a log that people see; `ConfigurationError` if this is not the log of a durable class."""
    if not is_log(log):
        raise ConfigurationError(
            f"{where} is not the log of a durable class: it has the columns {', '.join(log.names)[:200]}"
        )
    return pa.schema([field for field in log if not field.name.startswith("_")])


def events_of(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the events among the rows of a log, in the columns that people see. Kinds that begin with ``$`` are the shard's own."""
    events = pc.invert(pc.starts_with(rows.column("kind"), "$"))
    return rows.select([name for name in rows.schema.names if not name.startswith("_")]).filter(events)
