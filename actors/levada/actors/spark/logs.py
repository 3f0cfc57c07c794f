"""The log of a durable class as Spark sees it: its events.

The bridge marks the columns as a log's. The tasks leave out all rows but events, so the bridge can send blocks as they are on disk.
"""

from __future__ import annotations

import pyarrow as pa

from levada.actors.journal.log_events import event_columns

__all__ = ["is_log", "shown"]

_MARK = b"levada.log"


def shown(log: pa.Schema) -> pa.Schema:
    """Return the columns of a log that Spark sees, marked as a log's; `ConfigurationError` if this is not the log of a durable class."""
    return event_columns(log).with_metadata({_MARK: b""})


def is_log(columns: pa.Schema) -> bool:
    """Whether `shown` made these columns."""
    return _MARK in (columns.metadata or {})
