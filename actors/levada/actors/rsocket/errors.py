"""Errors of requests and of whole connections.

A handler raises a subclass of `RequestFailed` to choose the code that the peer sees, and the requester catches the same class. If the
handler itself got the error from another peer, its requester sees an `ApplicationError`. Any other exception of a handler fails its
stream and is an `ApplicationError` for the peer, with an id in place of its text (`ServerConfig.error_texts`). Requests on a lost
connection end with `levada.framework.errors.ConnectionLost`.
"""

from __future__ import annotations

from typing import ClassVar, Final

import attrs

from levada.framework.errors import ChannelError, ConnectionLost
from levada.transports.rsocket import ErrorCode
from levada.transports.rsocket.codes import SETUP_CODES
from levada.transports.rsocket.events import FailedBy, StreamFailed

__all__ = [
    "NEEDS_STREAM", "ApplicationError", "NoEndpoint", "RequestCanceled", "RequestFailed", "RequestInvalid", "RequestRejected", "SetupRejected",
    "connection_lost", "error_data", "stream_failed",
]  # fmt: skip

NEEDS_STREAM: Final = "this is answered by a stream; send a request-stream"


@attrs.define(eq=False, slots=False, str=False)
class RequestFailed(ChannelError):
    """The responder ended a stream with an error; the connection stays open.

    Both the await of a single answer and `Receiver.receive` raise it. It is an answer, not a failure of the connection: ``except
    CarrierError`` does not catch it.
    """

    loss = "a request was answered with an error"

    code: int = 0
    """The code of the ERROR frame; codes above 0x300 belong to the application."""
    data: bytes = b""
    """The error's data as received, usually UTF-8. When an error is sent, trailing NULs are removed (RS-28)."""

    usual_code: ClassVar[int] = ErrorCode.APPLICATION_ERROR

    def __attrs_post_init__(self) -> None:
        self.code = self.code or self.usual_code
        self.data = self.data or self.detail.encode("utf-8", "backslashreplace")

    @property
    def retryable(self) -> bool:
        """Whether the request was certainly not processed, so that it may be sent again."""
        return False


@attrs.define(eq=False, slots=False, str=False)
class ApplicationError(RequestFailed):
    """APPLICATION_ERROR: the handler refused or failed; it may have done part of its work."""


@attrs.define(eq=False, slots=False, str=False)
class RequestRejected(RequestFailed):
    """REJECTED: the request was valid but refused without any processing (no lease, too many streams, draining), so it may be sent again."""

    usual_code: ClassVar[int] = ErrorCode.REJECTED

    @property
    def retryable(self) -> bool:
        """Always true."""
        return True


@attrs.define(eq=False, slots=False, str=False)
class RequestCanceled(RequestFailed):
    """CANCELED: the responder gave up; the request may have been processed in part."""

    usual_code: ClassVar[int] = ErrorCode.CANCELED


@attrs.define(eq=False, slots=False, str=False)
class RequestInvalid(RequestFailed):
    """INVALID: the responder cannot interpret this request; sending it again will not help."""

    usual_code: ClassVar[int] = ErrorCode.INVALID


_KINDS: dict[int, type[RequestFailed]] = {
    ErrorCode.APPLICATION_ERROR: ApplicationError,
    ErrorCode.REJECTED: RequestRejected,
    ErrorCode.CANCELED: RequestCanceled,
    ErrorCode.INVALID: RequestInvalid,
}


@attrs.define(eq=False, slots=False, str=False)
class SetupRejected(ConnectionLost):
    """The server refused the connection; its text says why."""


@attrs.define(eq=False, slots=False, str=False)
class NoEndpoint(ConnectionLost):
    """All endpoints are down, and the time to wait for one is over."""


def error_data(text: str) -> bytes:
    """Return a text as the data of an ERROR frame, which has room for it, whatever the text quotes."""
    return text.encode("utf-8", "backslashreplace")[:65_536]


def stream_failed(event: StreamFailed) -> ChannelError | ConnectionLost:
    """Return the error for a failed stream; a code without a class of its own gives a plain `RequestFailed` (RS-28, RS-29)."""
    if event.by is FailedBy.CONNECTION:
        return connection_lost(event.code, event.text)
    kind = _KINDS.get(event.code, RequestFailed)
    return kind(event.text, channel=f"stream {event.stream_id}", code=event.code, data=event.data)


def connection_lost(code: int, text: str) -> ConnectionLost:
    """Return the error for a connection that is over."""
    kind = SetupRejected if code in SETUP_CODES else ConnectionLost
    return kind(text or "the connection is over", code=code or None)
