"""States of a connection and of the two parts of a stream."""

from __future__ import annotations

import enum

__all__ = ["ConnectionState", "ReceivingState", "SendingState"]


class ConnectionState(enum.Enum):
    """Life of a connection. Source: QX-9, QX-36, QX-37."""

    GREETING = enum.auto()
    """The peer's parameters have not come."""
    OPEN = enum.auto()
    """Streams may be opened."""
    DRAINING = enum.auto()
    """The connection ends once the peer has everything queued."""
    ENDED = enum.auto()
    """Nothing is read any more; a CONNECTION_CLOSE may still be written."""


class SendingState(enum.Enum):
    """The sending part of a stream. Source: QX-22."""

    OPEN = enum.auto()
    """Data may be queued: *ready* and *send* of the specification."""
    ENDING = enum.auto()
    """The end is queued."""
    RESETTING = enum.auto()
    """RESET_STREAM is queued."""
    OVER = enum.auto()
    """The end or RESET_STREAM was written, or only the peer sends."""


class ReceivingState(enum.Enum):
    """The receiving part of a stream. Source: QX-23."""

    OPEN = enum.auto()
    """Data may come: *recv* of the specification."""
    SIZE_KNOWN = enum.auto()
    """The end has come; the application has not yet taken everything."""
    STOPPED = enum.auto()
    """This side wants no more; the end has not come."""
    OVER = enum.auto()
    """Everything was taken, or RESET_STREAM came, or only this side sends."""
