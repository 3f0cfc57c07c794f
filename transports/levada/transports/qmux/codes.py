"""Error codes of QMux, and the exception for a broken rule."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["MAX_CODE", "ClosedByPeer", "ConnectionFault", "TransportError", "error_name"]

MAX_CODE: Final = (1 << 62) - 1
"""The largest code of a reset, a stop or a close. Source: QX-1."""


class TransportError(enum.IntEnum):
    """Code of a CONNECTION_CLOSE that the transport itself sends. Source: section 9."""

    NO_ERROR = 0x00
    """The connection ends without an error."""
    INTERNAL_ERROR = 0x01
    """The side that sends this code has failed."""
    CONNECTION_REFUSED = 0x02
    """Only received."""
    FLOW_CONTROL_ERROR = 0x03
    """More bytes than the limit of a stream or of the connection. Source: QX-24, QX-27."""
    STREAM_LIMIT_ERROR = 0x04
    """More streams than allowed. Source: QX-21, QX-28."""
    STREAM_STATE_ERROR = 0x05
    """A frame that its stream cannot have. Source: QX-21."""
    FINAL_SIZE_ERROR = 0x06
    """The final size of a stream changed. Source: QX-24."""
    FRAME_ENCODING_ERROR = 0x07
    """A malformed frame or record. Source: QX-3, QX-4, QX-8, QX-12, QX-26."""
    TRANSPORT_PARAMETER_ERROR = 0x08
    """Malformed or prohibited parameters. Source: QX-12, QX-14, QX-15, QX-17."""
    PROTOCOL_VIOLATION = 0x0A
    """Any other broken rule. Source: QX-2, QX-9, QX-10, QX-11."""
    APPLICATION_ERROR = 0x0C
    """Only received."""


def error_name(code: int) -> str:
    """Return the name of a transport error.

    Example:
        >>> error_name(7), error_name(1002)
        ('FRAME_ENCODING_ERROR', 'transport error 1002')
    """
    try:
        return TransportError(code).name
    except ValueError:
        return f"transport error {code}"


class ConnectionFault(Exception):
    """The peer broke a rule. This exception never leaves the core.

    Args:
        code: the code for the peer.
        rule: the id of the rule.
        detail: the mistake in words.
    """

    def __init__(self, code: TransportError, rule: str, detail: str) -> None:
        super().__init__(code, rule, detail)
        self.code = code
        self.rule = rule
        self.detail = detail


class ClosedByPeer(Exception):
    """CONNECTION_CLOSE has come. This exception never leaves the core.

    Args:
        code: the application's code, or the transport's.
        reason: the peer's text.
        transport: whether the transport closed, not the application.
    """

    def __init__(self, code: int, reason: str, *, transport: bool) -> None:
        super().__init__(code, reason, transport)
        self.code = code
        self.reason = reason
        self.transport = transport
