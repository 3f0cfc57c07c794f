"""The errors that only Lumberjack has.

The protocol has no error frame and no error codes: a reader that refuses a writer closes the connection (LJ-1).
"""

from __future__ import annotations

import attrs

from levada.framework.errors import LocalProtocolError

__all__ = ["EventRejected"]


@attrs.define(eq=False, slots=False, str=False)
class EventRejected(LocalProtocolError, ValueError):
    """An event cannot be encoded, or its frame is larger than `WriterConfig.max_frame` (LJ-59). Nothing was queued."""

    size: int = 0
    """Bytes of its frame; 0 if it could not be encoded."""
    limit: int = 0
    """Bytes that a frame may have; 0 if the event could not be encoded."""
