"""What the core tells its owner: events, and what is to be done to the QUIC connection.

They are made for each operation, so they are plain slotted classes: freezing them costs three times as much.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from levada.framework.errors import RemoteProtocolError
from levada.transports.text import printable

from .config import HandlerSpec
from .versions import Capability, Version

__all__ = [
    "Approved",
    "Audited",
    "AuthenticationReceived",
    "Begun",
    "BodyEnded",
    "BodyReceived",
    "BodyWanted",
    "CloseConnection",
    "Completed",
    "ConnectionEnded",
    "Disapproved",
    "Draining",
    "Event",
    "Execute",
    "Failed",
    "OpenStream",
    "OperationCancelled",
    "OperationOffered",
    "Output",
    "Received",
    "Refused",
    "ResetStream",
    "ResponseRejected",
    "ResponseStarted",
    "RoomWanted",
    "SetPriority",
    "Stepped",
    "StopStream",
    "StreamData",
    "StreamUnblocked",
]

Octets: TypeAlias = bytes | memoryview
"""A piece of a body; large ones are views of what was received."""

# ---------------------------------------------------------------- the connection


@attrs.define
class AuthenticationReceived:
    """Server: a client wants in; format, limits and version are right. Answer with `approve_client` or `disapprove_client`."""

    auth_type: str
    """Scheme, in lower case."""
    token: bytes = attrs.field(repr=False)
    """Opaque; never logged."""
    pairs: dict[str, str]
    """Metadata of the session."""
    version: Version
    """What the client speaks."""
    vendor: str
    """The client's program."""
    capabilities: Capability
    """What the client announces."""


@attrs.define
class Approved:
    """The session is open; operations may begin."""

    session_id: bytes
    """16 octets, for correlation."""
    identifier: str
    """The server's name for the client."""
    version: tuple[int, int, int]
    """The effective version."""
    vendor: str
    """The peer's program."""
    capabilities: Capability
    """What both sides can do."""


@attrs.define
class Disapproved:
    """The server refused, or is refused to; the connection ends soon."""

    code: int
    """See `ErrorCode`."""
    retry_after: float | None
    """Seconds until another attempt makes sense; None without a hint."""
    reason: str = attrs.field(converter=printable)
    """For people."""


@attrs.define
class Draining:
    """No new operations; the connection ends when those that run have ended, or when the time is up."""

    drain_time: float
    """Seconds that are left."""
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
    """For people."""
    error: RemoteProtocolError | None = None
    """What the peer did wrong, if that is why."""


@attrs.define
class Audited:
    """Something that belongs into the audit log. Source: MA-33, MA-43."""

    stream_id: int
    """Where."""
    code: int
    """See `ErrorCode`."""
    detail: str = attrs.field(converter=printable)
    """What happened."""


@attrs.define
class StreamUnblocked:
    """A stream for which `MaopCore.is_blocked` was true is read again."""

    stream_id: int
    """Which."""


@attrs.define
class RoomWanted:
    """The core has more for a stream than should be queued there: say `MaopCore.has_room` once the stream has room again."""

    stream_id: int
    """Which."""


@attrs.define
class Begun:
    """An operation of ours has begun; only while `MaopCore.steps` is true. Source: MA-132."""

    stream_id: int
    """Its stream."""
    msg_id: int
    """Names the peer's handler."""
    octets: int | None
    """Announced length of the body; None if that is undefined."""
    priority: int
    """0 (first) to 255."""


@attrs.define
class Stepped:
    """A step of an operation of either side that nobody needs to act on; only while `MaopCore.steps` is true. Source: MA-132."""

    stream_id: int
    """Which."""
    step: Literal["proceed", "first_block", "last_block", "response", "cancelled"]
    """What happened.

    The first Block of a body that comes in, its Block End, or a Response (one of ours begins, or the header of the peer's has come);
    the Proceed for an operation of ours, or its cancellation by the application.
    """
    octets: int | None
    """Of the body so far; of a Response as announced, and None if that is undefined."""


# ---------------------------------------------------------------- operations of the peer


class Received:
    """An operation of the peer, for the application to read. Only the core changes it. Source: MA-114."""

    __slots__ = (
        "approved_at",
        "deadline",
        "exec_at",
        "idempotency_key",
        "is_request",
        "length",
        "msg_id",
        "priority",
        "response_msg_id",
        "response_timeout",
        "since",
        "spec",
        "stream_id",
    )

    stream_id: int
    """Its identity within the session. Source: MA-42."""
    is_request: bool
    """Whether a Response is wanted; else a Message."""
    msg_id: int
    """Names the handler."""
    length: int | None
    """Bytes announced; None for undefined length."""
    priority: int
    """0 (first) to 255."""
    response_msg_id: int
    """Kind of the Response that is wanted; of no meaning for a Message."""
    response_timeout: float | None
    """Seconds from the whole body to the Response header; None without limit."""
    idempotency_key: bytes
    """16 bytes, or none."""
    spec: HandlerSpec
    """What was declared for its msg_id."""
    since: float
    """When the header came."""
    approved_at: float
    """When all checks were passed."""
    exec_at: float
    """When the body was complete."""
    deadline: float | None
    """When the core gives it up."""


@attrs.define(eq=False)
class OperationOffered:
    """An operation for a gated handler has passed all checks of the core; answer with `proceed` or `refuse`."""

    operation: Received
    """Its header."""


@attrs.define(eq=False)
class Execute:
    """A handler has to start; exactly one of `finish`, `respond`, `fail` ends it, or `OperationCancelled` does."""

    operation: Received
    """Its header."""
    body: bytes | None
    """The whole body; None for a streaming handler, which gets `BodyReceived` and `BodyEnded`."""


@attrs.define
class OperationCancelled:
    """An operation that was offered or executed is over (`onCancel`); nothing more is said of it. Source: MA-113."""

    stream_id: int
    """Which."""
    code: int
    """See `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """For the log."""


@attrs.define
class ResponseRejected:
    """The requester could not use the Response. Source: MA-71."""

    stream_id: int
    """Which."""
    code: int
    """See `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """For people."""


# ---------------------------------------------------------------- bodies, either way


@attrs.define
class BodyReceived:
    """A piece of a streamed body; say `body_consumed` when it is used."""

    stream_id: int
    """Which."""
    data: Octets
    """Octets of it."""


@attrs.define
class BodyEnded:
    """A streamed body is complete and right. Nothing that was done with it counts before. Source: MA-113."""

    stream_id: int
    """Which."""
    total: int
    """Its octets."""


# ---------------------------------------------------------------- operations of our own


@attrs.define
class BodyWanted:
    """The peer said Proceed: `send_body` and `end_body`."""

    stream_id: int
    """Which."""


@attrs.define
class ResponseStarted:
    """A streamed Response begins."""

    stream_id: int
    """Which."""
    length: int | None
    """Octets announced, the Success header included; None for undefined length."""
    content_type: str | None
    """Of a Success; None for other kinds and for no body."""
    exec_start_ms: int
    """The responder's clock, UNIX milliseconds."""
    exec_time_ms: int
    """How long it computed."""


@attrs.define
class Completed:
    """An operation of our own succeeded: Done for a Message, a whole Response for a Request."""

    stream_id: int
    """Which."""
    body: bytes | None
    """The Response's body, without Success header; None for Messages and streamed Responses."""
    content_type: str | None
    """Of a Success; None for other kinds and for no body."""
    exec_start_ms: int
    """The peer's clock, UNIX milliseconds."""
    exec_time_ms: int
    """How long it took there."""
    length: int | None = None
    """Octets that a Response announced; None for undefined length and for Messages."""
    blocks: int = 0
    """Blocks of the Response, for tests of conformance."""


@attrs.define
class Refused:
    """The peer refused an operation of our own."""

    stream_id: int
    """Which."""
    code: int
    """See `ErrorCode`."""
    retry_after: float | None
    """Seconds until a repetition makes sense, on a new stream; None without a hint."""


@attrs.define
class Failed:
    """An operation of our own failed."""

    stream_id: int
    """Which."""
    code: int
    """See `ErrorCode`."""
    reason: str = attrs.field(converter=printable)
    """For people."""
    by_peer: bool
    """Whether the peer said so; else this side found out by itself."""
    not_executed: bool = False
    """Whether it is certain that the peer did nothing. Source: MA-120, section 21."""


Event: TypeAlias = (
    AuthenticationReceived
    | Approved
    | Disapproved
    | Draining
    | ConnectionEnded
    | Audited
    | StreamUnblocked
    | RoomWanted
    | Begun
    | Stepped
    | OperationOffered
    | Execute
    | OperationCancelled
    | ResponseRejected
    | BodyReceived
    | BodyEnded
    | BodyWanted
    | ResponseStarted
    | Completed
    | Refused
    | Failed
)

# ---------------------------------------------------------------- outputs


@attrs.define
class OpenStream:
    """Open a stream. Streams of one kind, opened in this order, get these very ids from QUIC."""

    stream_id: int
    """Number under which the core speaks of it."""
    unidirectional: bool
    """Whether only this side sends on it."""
    priority: int
    """0 (first) to 255 of the operation; -1 for control streams. Source: MA-116."""


@attrs.define
class SetPriority:
    """The Response on a stream of the peer has this priority. Source: MA-116."""

    stream_id: int
    """Which."""
    priority: int
    """0 (first) to 255."""


@attrs.define
class StreamData:
    """Send octets on a stream, in order; wait for room there without holding up other streams."""

    stream_id: int
    """Which."""
    data: Octets
    """Octets; may be empty if `fin`."""
    fin: bool
    """Whether they are the last."""


@attrs.define
class ResetStream:
    """Reset this side's direction of a stream, and forget what waits to be sent there."""

    stream_id: int
    """Which."""
    code: int
    """Application error code."""


@attrs.define
class StopStream:
    """Ask the peer to stop sending on a stream. What still comes may be given to the core; its end must be."""

    stream_id: int
    """Which."""
    code: int
    """Application error code."""


@attrs.define
class CloseConnection:
    """Close the QUIC connection at once. The last output."""

    code: int
    """0 orderly, else 0x100 and an `ErrorCode`. Source: MA-7."""
    reason: str = attrs.field(converter=printable)
    """For people."""


Output: TypeAlias = OpenStream | SetPriority | StreamData | ResetStream | StopStream | CloseConnection
