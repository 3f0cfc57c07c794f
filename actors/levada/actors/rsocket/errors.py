"""What a request, or a whole connection, can end with.

A handler raises one of the classes below `RequestFailed` to choose the code that the peer sees, and the requester gets the same class:
what one side raises the other side catches. One that it got itself from another peer becomes an `ApplicationError` on its way.
Any other exception of a handler is a failure of its stream and an `ApplicationError` for
the peer. A connection that is lost ends its requests with `levada.framework.errors.ConnectionLost`.
"""

from __future__ import annotations

from typing import ClassVar

import attrs

from levada.framework.errors import ChannelError, ConnectionLost, StreamError
from levada.transports.rsocket import ErrorCode
from levada.transports.rsocket.errors import SETUP_CODES
from levada.transports.rsocket.events import FailedBy, StreamFailed

__all__ = [
    "ApplicationError", "NoEndpoint", "RequestCanceled", "RequestFailed", "RequestInvalid", "RequestRejected", "SetupRejected",
    "connection_lost", "stream_failed",
]  # fmt: skip


@attrs.define(eq=False, slots=False, str=False)
class RequestFailed(ChannelError, StreamError):
    """The responder ended a stream with an error; the connection lives on.

    It is raised by the await of a single answer and by `Receiver.receive` alike. Codes above 0x300 are the application's own.
    """

    data: bytes = b""
    """The error's data as it came, UTF-8 as a rule. Of what is sent, NULs at the end are left out (RS-28)."""

    usual_code: ClassVar[int] = ErrorCode.APPLICATION_ERROR

    def __attrs_post_init__(self) -> None:
        self.code = self.code or self.usual_code
        self.data = self.data or self.detail.encode()

    @property
    def retryable(self) -> bool:
        """Whether the request is known not to have been processed, so that it may be sent again."""
        return False


@attrs.define(eq=False, slots=False, str=False)
class ApplicationError(RequestFailed):
    """APPLICATION_ERROR: the handler refused or failed; what it has done by then is its own affair."""


@attrs.define(eq=False, slots=False, str=False)
class RequestRejected(RequestFailed):
    """REJECTED: valid and refused, without any processing (no lease, too many streams, draining): it may be sent again."""

    usual_code: ClassVar[int] = ErrorCode.REJECTED

    @property
    def retryable(self) -> bool:
        """True."""
        return True


@attrs.define(eq=False, slots=False, str=False)
class RequestCanceled(RequestFailed):
    """CANCELED: the responder gave up; the request may have been processed in part."""

    usual_code: ClassVar[int] = ErrorCode.CANCELED


@attrs.define(eq=False, slots=False, str=False)
class RequestInvalid(RequestFailed):
    """INVALID: the responder can make nothing of this request; sending it again will not help."""

    usual_code: ClassVar[int] = ErrorCode.INVALID


_KINDS: dict[int, type[RequestFailed]] = {
    ErrorCode.APPLICATION_ERROR: ApplicationError,
    ErrorCode.REJECTED: RequestRejected,
    ErrorCode.CANCELED: RequestCanceled,
    ErrorCode.INVALID: RequestInvalid,
}


@attrs.define(eq=False, slots=False, str=False)
class SetupRejected(ConnectionLost):
    """The server refused the connection, or a hook of this server refuses one by raising this; the text travels as the error's data."""


@attrs.define(eq=False, slots=False, str=False)
class NoEndpoint(ConnectionLost):
    """No connection to send the request on: all endpoints are down, and the time to wait for one is over."""


def stream_failed(event: StreamFailed) -> ChannelError | ConnectionLost:
    """Make the error for a stream that is over; a code without a class of its own gives a plain `RequestFailed` (RS-28, RS-29)."""
    if event.by is FailedBy.CONNECTION:
        return connection_lost(event.code, event.text)
    kind = _KINDS.get(event.code, RequestFailed)
    return kind(event.text, channel=f"stream {event.stream_id}", code=event.code, data=event.data)


def connection_lost(code: int, text: str) -> ConnectionLost:
    """Make the error for a connection that is over."""
    kind = SetupRejected if code in SETUP_CODES else ConnectionLost
    return kind(text or "the connection is over", code=code or None)
