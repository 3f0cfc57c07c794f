"""What can go wrong in Lumberjack beside the errors that all protocols share.

The protocol has no error frame: a reader that refuses closes the connection (LJ-1), so there are no codes here.
"""

from __future__ import annotations

import attrs

from levada.framework.errors import LocalProtocolError

__all__ = ["EventRejected"]


@attrs.define(eq=False, slots=False, str=False)
class EventRejected(LocalProtocolError, ValueError):
    """An event that no window can hold: it cannot be encoded, or is larger than a frame may be (LJ-59). Nothing was queued."""

    size: int = 0
    """Bytes of its frame; 0 if it could not be encoded at all."""
    limit: int = 0
    """Bytes that a frame may have."""
