"""Error codes of ReactiveSocket (RX-22). On the wire and in events they are integers, since applications have codes of their own."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ErrorCode"]


class ErrorCode(IntEnum):
    """Codes of an ERROR frame.

    Source: error codes (section 3.1 of the rules, RX-22).
    """

    INVALID_SETUP = 0x001
    """The SETUP is not valid for this server, for example from a newer client."""
    UNSUPPORTED_SETUP = 0x002
    """Some parameters of the SETUP are not supported."""
    REJECTED_SETUP = 0x003
    """The server refused; the reason may be in the data."""
    CONNECTION_ERROR = 0x101
    """The connection ends at once."""
    APPLICATION_ERROR = 0x201
    """The application failed. An unknown code on a stream counts as this one (RX-25)."""
    REJECTED = 0x202
    """Not processed; the reason is in the metadata (RX-23)."""
    CANCELED = 0x203
    """The responder gave up; the request may have been processed in part."""
    INVALID = 0x204
    """The request is invalid."""


SETUP_CODES = range(0x001, 0x100)  # RX-22
STREAM_CODES = range(0x201, 0xFFFFFFFF)  # RX-22
