"""The error codes of RSocket, and the errors that only this protocol has."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import attrs

from levada.framework.errors import DecodeError, LocalProtocolError

__all__ = [
    "SETUP_CODES", "ErrorCode", "InvalidFrame", "StreamIdsExhausted", "is_stream_code",
]  # fmt: skip


class ErrorCode(IntEnum):
    """Codes of an ERROR frame (reference, section 3.1). 0x301 to 0xFFFFFFFE are free for applications (RS-27)."""

    INVALID_SETUP = 0x001
    """SETUP is not valid for this server; stream 0."""
    UNSUPPORTED_SETUP = 0x002
    """Some parameters of SETUP are not supported; stream 0."""
    REJECTED_SETUP = 0x003
    """The server refused; the reason may be in the data; stream 0."""
    REJECTED_RESUME = 0x004
    """The session cannot be resumed; stream 0."""
    CONNECTION_ERROR = 0x101
    """The connection is over at once; stream 0."""
    CONNECTION_CLOSE = 0x102
    """The connection ends when its streams have ended; stream 0."""
    APPLICATION_ERROR = 0x201
    """The responder, or the source of a channel's requester, failed."""
    REJECTED = 0x202
    """A valid request that was refused and certainly not processed."""
    CANCELED = 0x203
    """The responder gave up; the request may have been processed in part."""
    INVALID = 0x204
    """The request is invalid."""


SETUP_CODES: Final = frozenset(
    (ErrorCode.INVALID_SETUP, ErrorCode.UNSUPPORTED_SETUP, ErrorCode.REJECTED_SETUP, ErrorCode.REJECTED_RESUME)
)
_STREAM_CODES: Final = frozenset(
    (ErrorCode.APPLICATION_ERROR, ErrorCode.REJECTED, ErrorCode.CANCELED, ErrorCode.INVALID)
)


def is_stream_code(code: int) -> bool:
    """Return whether an ERROR on a stream may have this code: one of the protocol's, or of an application (RS-27)."""
    return code in _STREAM_CODES or 0x301 <= code <= 0xFFFFFFFE


@attrs.define(eq=False, slots=False, str=False)
class StreamIdsExhausted(LocalProtocolError):
    """Every stream id has been used, and ids must not be used again: open a new connection (RS-20)."""


@attrs.define(eq=False, slots=False, str=False)
class InvalidFrame(DecodeError):
    """Bytes that are not a frame of their type: too few of them, or a metadata length beyond the end of the frame."""

    rule: str = "RS-12"
    """Id of the broken rule."""
