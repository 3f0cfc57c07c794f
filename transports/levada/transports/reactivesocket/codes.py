"""Error codes of ReactiveSocket (RX-22); they stay integers on the wire and in events, since applications have their own."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ErrorCode"]


class ErrorCode(IntEnum):
    """What an ERROR frame says.

    Source: error codes (section 3.1 of the rules, RX-22).
    """

    INVALID_SETUP = 0x001
    """The SETUP is not valid for this server, for example from a newer client."""
    UNSUPPORTED_SETUP = 0x002
    """Some parameters of the SETUP are not supported."""
    REJECTED_SETUP = 0x003
    """The server refuses; the reason may be in the data."""
    CONNECTION_ERROR = 0x101
    """The connection is being terminated."""
    APPLICATION_ERROR = 0x201
    """The application's own failure; also what an unknown code on a stream counts as (RX-25)."""
    REJECTED = 0x202
    """Not processed; the reason is in the metadata (RX-23)."""
    CANCELED = 0x203
    """Ended by the responder, maybe processed in part."""
    INVALID = 0x204
    """The request is invalid."""


SETUP_CODES = range(0x001, 0x100)  # RX-22
STREAM_CODES = range(0x201, 0xFFFFFFFF)  # RX-22
