"""Events for the owner of the core, and outputs to carry out on the QUIC connection.

They are created for each operation, so they are plain slotted classes: freezing them costs three times as much.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from levada.framework.errors import RemoteProtocolError
from levada.framework.text import printable
from levada.transports.core import OpenStream, ResetStream, StopStream, StreamData

from .config import HandlerSpec
from .versions import Capability, Version

__all__ = [
    "Approved", "Audited", "AuthenticationReceived", "Begun", "BodyEnded", "BodyReceived", "BodyWanted",
    "CloseConnection", "Completed", "ConnectionEnded", "Disapproved", "Draining", "Event", "Execute", "Failed",
    "OperationCancelled", "OperationOffered", "Output", "Received", "Refused", "ResponseRejected", "ResponseStarted",
    "RoomWanted", "SetPriority", "Stepped", "StreamUnblocked",
]  # fmt: skip

Octets: TypeAlias = bytes | memoryview
"""A piece of a body; large ones are views of the input."""


@attrs.define
class AuthenticationReceived:
    """Server: a client authenticates, with valid format, limits and version. Answer with `approve_client` or `disapprove_client`."""

    auth_type: str
    """Scheme, in lower case."""
    token: bytes = attrs.field(repr=False)
    """Opaque, never logged."""
    pairs: dict[str, str] = attrs.field(repr=False)
    """Metadata of the session."""
    version: Version
    """The client's protocol version."""
    vendor: str
    """The client's program."""
    capabilities: Capability
    """The capabilities that the client announces."""


@attrs.define
class Approved:
    """The session is open; operations may begin."""

    session_id: bytes
    """16 bytes, for correlation."""
    identifier: str
    """The server's name for the client."""
    version: tuple[int, int, int]
    """The effective protocol version."""
    vendor: str
    """The peer's program."""
    capabilities: Capability
    """The capabilities of both sides."""


@attrs.define
class Disapproved:
    """The server refused the client; the connection ends soon."""

    code: int
    """An `ErrorCode`."""
    retry_after: float | None
    """Seconds until another attempt makes sense; None without a hint."""
    reason: str = attrs.field(converter=printable)
    """Text for people."""


@attrs.define
class Draining:
    """No new operations may begin; the connection ends when the running ones have ended, or when the time is up."""

    drain_time: float
    """Seconds left."""
    reason: str = attrs.field(converter=printable)
    """For diagnostics."""
    by_peer: bool
    """Whether the peer asked."""


@attrs.define
class ConnectionEnded:
    """The last event."""

    code: int
    """Application code of the close: 0 orderly, else 0x100 and an `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """Text for people."""
    error: RemoteProtocolError | None = None
    """The peer's mistake, if one ended the connection."""


@attrs.define
class Audited:
    """An entry for the audit log. Source: MA-33, MA-43."""

    stream_id: int
    """Number of the stream."""
    code: int
    """An `ErrorCode`."""
    detail: str = attrs.field(converter=printable)
    """Description."""


@attrs.define
class StreamUnblocked:
    """A stream for which `MaopCore.is_blocked` was true is read again."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class RoomWanted:
    """The core has more to send than the stream should queue: call `MaopCore.has_room` once the stream has room again."""

    stream_id: int
    """Number of the stream."""


@attrs.define
class Begun:
    """An operation of ours has begun; emitted only while `MaopCore.steps` is true. Source: MA-132."""

    stream_id: int
    """Number of its stream."""
    msg_id: int
    """The peer's handler."""
    size: int | None
    """Announced length of the body; None if undefined."""
    priority: int
    """0 (first) to 255."""


@attrs.define
class Stepped:
    """A step of an operation that needs no action; emitted only while `MaopCore.steps` is true. Source: MA-132."""

    stream_id: int
    """Number of its stream."""
    step: Literal["proceed", "first_block", "last_block", "response", "cancelled"]
    """The step: the first Block of an incoming body, its Block End, a Response (ours begins, or the peer's header has come), the Proceed
    for an operation of ours, or its cancellation by the application."""
    size: int | None
    """Bytes of the body so far; of a Response the announced length, None if undefined."""


class Received:
    """The peer's operation, for the application to read. Only the core changes it. Source: MA-114."""

    __slots__ = (
        "approved_at", "deadline", "exec_at", "idempotency_key", "is_request", "length", "msg_id", "priority",
        "response_msg_id", "response_timeout", "since", "spec", "stream_id", "trace",
    )  # fmt: skip

    stream_id: int
    """Its identity within the session. Source: MA-42."""
    is_request: bool
    """Whether a Response is wanted; else a Message."""
    msg_id: int
    """The handler."""
    length: int | None
    """Bytes announced; None for undefined length."""
    priority: int
    """0 (first) to 255."""
    response_msg_id: int
    """Kind of Response wanted; meaningless for a Message."""
    response_timeout: float | None
    """Seconds from the whole body to the Response header; None without limit."""
    idempotency_key: bytes
    """16 bytes, or none."""
    trace: bytes
    """``traceparent`` in 55 bytes and ``tracestate``, as the peer sent them, or none."""
    spec: HandlerSpec
    """The declaration of its msg_id."""
    since: float
    """When the header came."""
    approved_at: float
    """When it passed all checks."""
    exec_at: float
    """When the body was complete."""
    deadline: float | None
    """When the core gives it up."""


@attrs.define(eq=False)
class OperationOffered:
    """An operation for a gated handler passed the core's checks; answer with `proceed` or `refuse`."""

    operation: Received
    """Its header."""


@attrs.define(eq=False)
class Execute:
    """A handler must start. It ends with exactly one of `finish`, `respond` and `fail`, or with `OperationCancelled`."""

    operation: Received
    """Its header."""
    body: bytes | None
    """The whole body; None for a streaming handler, which gets `BodyReceived` and `BodyEnded`."""


@attrs.define
class OperationCancelled:
    """An offered or executed operation is over (`onCancel`); no further event names it. Source: MA-113."""

    stream_id: int
    """Number of its stream."""
    code: int
    """An `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """Text for the log."""


@attrs.define
class ResponseRejected:
    """The requester could not use the Response. Source: MA-71."""

    stream_id: int
    """Number of its stream."""
    code: int
    """An `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """Text for people."""


@attrs.define
class BodyReceived:
    """A piece of a streamed body; call `body_consumed` when it is used."""

    stream_id: int
    """Number of its stream."""
    data: Octets
    """The bytes."""


@attrs.define
class BodyEnded:
    """A streamed body is complete and correct. Until then nothing done with it counts. Source: MA-113."""

    stream_id: int
    """Number of its stream."""
    total: int
    """Its size in bytes."""


@attrs.define
class BodyWanted:
    """The peer said Proceed: call `send_body` and `end_body`."""

    stream_id: int
    """Number of its stream."""


@attrs.define
class ResponseStarted:
    """A streamed Response begins."""

    stream_id: int
    """Number of its stream."""
    length: int | None
    """Bytes announced, including the Success header; None for undefined length."""
    content_type: str | None
    """Of a Success; None for other kinds and for no body."""
    exec_start_ms: int
    """The responder's clock, UNIX milliseconds."""
    exec_time_ms: int
    """The responder's computing time."""


@attrs.define
class Completed:
    """Our operation succeeded: a Done for a Message, or a whole Response for a Request."""

    stream_id: int
    """Number of its stream."""
    body: bytes | None
    """The Response's body, without Success header; None for Messages and streamed Responses."""
    content_type: str | None
    """Of a Success; None for other kinds and for no body."""
    exec_start_ms: int
    """The peer's clock, UNIX milliseconds."""
    exec_time_ms: int
    """Time it took at the peer."""
    length: int | None = None
    """Bytes that a Response announced; None for undefined length and for Messages."""
    blocks: int = 0
    """Blocks of the Response, for conformance tests."""


@attrs.define
class Refused:
    """The peer refused our operation."""

    stream_id: int
    """Number of its stream."""
    code: int
    """An `ErrorCode`."""
    retry_after: float | None
    """Seconds until a retry on a new stream makes sense; None without a hint."""


@attrs.define
class Failed:
    """Our operation failed."""

    stream_id: int
    """Number of its stream."""
    code: int
    """An `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """Text for people."""
    by_peer: bool
    """Whether the peer reported it; otherwise this side found out by itself."""
    not_executed: bool = False
    """Whether the peer is certain to have done nothing. Source: MA-120, section 21."""


Event: TypeAlias = (
    AuthenticationReceived | Approved | Disapproved | Draining | ConnectionEnded | Audited | StreamUnblocked | RoomWanted | Begun |
    Stepped | OperationOffered | Execute | OperationCancelled | ResponseRejected | BodyReceived | BodyEnded | BodyWanted |
    ResponseStarted | Completed | Refused | Failed
)  # fmt: skip
"""The events of `MaopCore`."""


@attrs.define
class SetPriority:
    """The Response on a stream of the peer has this priority. Source: MA-116."""

    stream_id: int
    """Number of the stream."""
    priority: int
    """0 (first) to 255."""


@attrs.define
class CloseConnection:
    """Close the QUIC connection at once. The last output."""

    code: int
    """0 orderly, else 0x100 and an `ErrorCode`. Source: MA-7."""
    reason: str = attrs.field(converter=printable)
    """Text for people."""


Output: TypeAlias = OpenStream | SetPriority | StreamData | ResetStream | StopStream | CloseConnection
"""What `MaopCore` asks of the connection."""
